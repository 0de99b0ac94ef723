"""Rotary position embedding; the maths is in README.md.

`T` tokens, `H` heads, `P` head size, `D` rotated dimensions, `A` axes of positions, `L` positions of the table.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kernels.rope import Rope


@lru_cache(maxsize=8)
def rope_table(rope: Rope, positions: int, device: str) -> Tensor:
    """`[L, 2, D/2]` float32: cosines and sines of the positions below `positions`. Shared between layers."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims)
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
