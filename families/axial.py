"""Rotary positions of towers whose heads are rotated by a patch's row and column, as in the released Qwen towers.

T patches in merge-block order, F angles of a patch: half of a head's features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.item import Grid
from kernels.pixel_shuffle import shuffle_order


def places(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """`[T]` int64 each: row and column of each patch, in merge-block order."""
    order_T = shuffle_order(grid[0], grid[1], merge).view(-1)
    return order_T // grid[1], order_T % grid[1]


def frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """`[F / 2]` float32: those of the angles of one axis. `theta`: their base."""
    half = head_dim // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
    return 1.0 / (theta**exponents)


def axial_rotations(grid: Grid, merge: int, frequencies: Tensor) -> Tensor:
    """`[T, 2 F]` float32: cosines of the row's and then of the column's angles, then the sines."""
    of_axes = (place_T.to(frequencies.device) for place_T in places(grid, merge))
    angles_TF = torch.cat([place_T[:, None].float() * frequencies for place_T in of_axes], 1)
    return torch.cat((angles_TF.cos(), angles_TF.sin()), 1)
