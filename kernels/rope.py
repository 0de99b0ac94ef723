"""How queries and keys are rotated: the description, without the tensors (`kernels.rotary` rotates)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """How a layer's queries and keys are rotated. `ValueError` for sizes that cannot be."""

    dims: int
    """Rotated dimensions of each head, from the first on; even."""
    theta: float = 10000.0
    axes: tuple[int, ...] = ()
    """Which axis of the positions each of the `dims / 2` frequencies takes; empty: the first."""

    def __post_init__(self) -> None:
        if self.dims < 2 or self.dims % 2:
            raise ValueError(f"rotated dimensions must be even and at least 2, not {self.dims}")
        if not self.theta > 0:
            raise ValueError(f"rope theta must be above 0, not {self.theta}")
        if self.axes and (len(self.axes) != self.dims // 2 or min(self.axes) < 0):
            raise ValueError(f"{len(self.axes)} axes are given for {self.dims // 2} frequencies, or one is negative")

    @property
    def num_axes(self) -> int:
        """Axes that positions need at least."""
        return 1 + max(self.axes, default=0)
