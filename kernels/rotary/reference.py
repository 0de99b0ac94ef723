"""Rotary position embedding; the maths is in README.md.

`T` tokens, `H` heads, `P` head size, `D` rotated dimensions, `A` axes of positions, `L` positions of the table.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kernels.rms_norm.reference import rms_norm
from kernels.rope import Rope


@lru_cache(maxsize=8)
def rope_table(rope: Rope, positions: int, device: str) -> Tensor:
    """`[L, 2, D/2]` float32: cosines and sines of positions 0 to `positions - 1`. Cached, so that layers share it."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims)
    if rope.frequencies is not None:
        frequencies[rope.frequencies :] = 0.0
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(device)


def rotate(x_THP: Tensor, table: Tensor, positions_TA: Tensor, axes: tuple[int, ...] = ()) -> Tensor:
    """Rotates heads: a new tensor `[T, H, P]` in x's dtype. `table`: from `rope_table`; `axes`: see `Rope`. Positions
    below 0 (padding) count as 0."""
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


def norm_rotate(
    x_THP: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    table: Tensor | None,
    positions_TA: Tensor | None,
    axes: tuple[int, ...] = (),
) -> Tensor:
    """Prepares the queries and keys of one product for attention: an RMS norm of each head, then `rotate`. `[T, H, P]`
    in x's dtype; x itself if there is neither.

    `norms`: weights `[P]` float32 for the first `heads` heads (queries) and for the keys after them, or `None` for no
    norm. Without a table nothing is rotated. Rows of x may have any stride; heads are contiguous.
    """
    if norms is not None:
        width, keys = x_THP.shape[-1], x_THP.shape[1] - heads
        parts = zip(x_THP.split([heads, keys], dim=1), norms, strict=True)
        x_THP = torch.cat([rms_norm(part.reshape(-1, width), w, eps).view(part.shape) for part, w in parts], dim=1)
    if table is None:
        return x_THP
    assert positions_TA is not None
    return rotate(x_THP, table, positions_TA, axes)
