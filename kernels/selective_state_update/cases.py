"""Cases of selective_state_update that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.selective_state_update.kernel import selective_state_update, selective_state_update_tokens
from kernels.shapes import Case, ModelShape, meta


def mixed(shape: ModelShape, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, B and C as the convolution outputs them: parts of the same rows."""
    channels = meta(rows, shape.conv_channels, dtype=dtype)
    size = shape.groups * shape.state
    x, b, c = channels.split([shape.mamba_inner, size, size], dim=-1)
    by_group = (shape.groups, shape.state)
    return x.unflatten(1, (shape.mamba_heads, -1)), b.unflatten(1, by_group), c.unflatten(1, by_group)


def states(shape: ModelShape, dtype: torch.dtype = torch.float32) -> Tensor:
    """A pool of non-contiguous slots, as in the arena."""
    size = shape.mamba_inner * shape.state
    return meta(16, 2 * size, dtype=dtype)[:, :size].unflatten(
        1, (shape.mamba_heads, shape.mamba_head_dim, shape.state)
    )


def cases(shape: ModelShape) -> Iterator[Case]:
    """One token per row, and a step with three drafts per row."""
    if not shape.mamba_heads:
        return
    slots, head = meta(64, dtype=torch.int64), meta(shape.mamba_heads)
    for dtype in shape.dtypes:
        x, b, c = mixed(shape, 64, dtype)
        dt = meta(64, shape.mamba_inner + shape.conv_channels + shape.mamba_heads, dtype=dtype)[:, -shape.mamba_heads :]
        call = partial(selective_state_update, states(shape), slots, x, dt, head, b, c, head, head)
        name = str(dtype).removeprefix("torch.")
        yield Case(name, call)
        x, dt, b, c = (part.unflatten(0, (16, 4)) for part in (x, dt, b, c))
        rows = (meta(16, 4, dtype=torch.int64), meta(16, dtype=torch.int64), meta(16, dtype=torch.int64))
        several = partial(selective_state_update_tokens, states(shape), *rows, x, dt, head, b, c, head, head)
        yield Case(f"tokens {name}", several)
