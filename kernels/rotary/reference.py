"""Rotary position embedding; the maths is in README.md.

`T` tokens, `H` heads, `P` head size, `D` rotated dimensions, `A` axes of positions, `L` positions of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


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


@lru_cache(maxsize=8)
def rope_table(rope: Rope, positions: int, device: str) -> Tensor:
    """`[L, 2, D/2]` float32: cosines and sines of the positions below `positions`. Shared between layers."""
    frequencies = rope.theta ** -(torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def rotate(x_THP: Tensor, table: Tensor, positions_TA: Tensor, axes: tuple[int, ...] = ()) -> Tensor:
    """New memory, `[T, H, P]` in x's dtype. `axes`: as in `Rope`. Positions below 0, of padding, count as 0."""
    half = table.shape[-1]
    at_TA = positions_TA.clamp(min=0)
    if not axes:
        turned = table.index_select(0, at_TA[:, 0])
    else:
        chosen = at_TA[:, list(axes)]  # [T, D/2]
        columns = torch.arange(half, device=table.device)
        turned = torch.stack((table[chosen, 0, columns], table[chosen, 1, columns]), dim=1)
    cos, sin = turned.to(x_THP.dtype)[:, None].unbind(2)
    first, second, rest = x_THP.split([half, half, x_THP.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
