"""Parameters of rotary positions, without tensors (`kernels.rotary` rotates)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """How a layer's queries and keys are rotated. Raises `ValueError` for impossible sizes."""

    dims: int
    """Rotated dimensions at the beginning of each head; even."""
    theta: float = 10000.0
    axes: tuple[int, ...] = ()
    """For each of the `dims / 2` frequencies, the axis of the positions that it uses; empty: the first axis for all."""
    frequencies: int | None = None
    """How many of the `dims / 2` frequencies, the first ones, are not 0: pairs with the others are not rotated; None:
    all."""

    def __post_init__(self) -> None:
        if self.dims < 2 or self.dims % 2:
            raise ValueError(f"rotated dimensions must be even and at least 2, not {self.dims}")
        if not self.theta > 0:
            raise ValueError(f"rope theta must be above 0, not {self.theta}")
        if self.frequencies is not None and not 0 < self.frequencies <= self.dims // 2:
            raise ValueError(
                f"{self.frequencies} frequencies that are not 0 are given; 1 to {self.dims // 2} are possible"
            )
        if self.axes and (len(self.axes) != self.dims // 2 or min(self.axes) < 0):
            raise ValueError(f"{len(self.axes)} axes are given for {self.dims // 2} frequencies, or one is negative")

    @property
    def num_axes(self) -> int:
        """The least number of axes that positions must have."""
        return 1 + max(self.axes, default=0)
