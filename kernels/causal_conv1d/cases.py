"""Cases of causal_conv1d that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.causal_conv1d.kernel import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.scan_tables import ScanTables
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """A prefill of two rows, one token per row, and a step with three drafts per row. The convolution before a gated
    delta rule has no bias, and short convolutions have no activation."""
    if shape.mamba_heads:
        channels, before = shape.conv_channels, shape.mamba_inner
        width = before + channels + shape.mamba_heads
        yield from _cases(shape, "", shape.conv, channels, width, before, meta(channels))
    if heads := shape.delta_value_heads:
        channels, before = shape.delta_channels, heads * shape.delta_head_dim
        yield from _cases(shape, "delta ", shape.conv, channels, before + channels + 2 * heads, before, None)
    if shape.short_conv:
        yield from _cases(shape, "short ", shape.short_conv, shape.hidden, shape.hidden, 0, None, silu=False)


def _cases(
    shape: ModelShape, kind: str, taps: int, channels: int, width: int, before: int, bias: Tensor | None,
    *, silu: bool = True,
) -> Iterator[Case]:  # fmt: skip
    """`before`: index of the first channel in a row of `width` numbers."""
    weight = meta(taps, channels)
    tables = ScanTables.of([300, 50], [0, 7], shape.chunk, device="meta")
    two = (meta(2, dtype=torch.int64), meta(2, dtype=torch.bool), meta(3, dtype=torch.int64))
    for dtype in shape.dtypes:
        name = kind + str(dtype).removeprefix("torch.")
        pool = meta(16, 4 * taps * channels, dtype=dtype)[:, : (taps - 1) * channels].unflatten(1, (taps - 1, channels))
        x = meta(350, width, dtype=dtype)[:, before : before + channels]
        given = (weight, bias, pool)
        yield Case(f"packed {name}", partial(causal_conv1d, x, *given, *two, (), tables, silu))
        yield Case(
            f"update {name}", partial(causal_conv1d_update, x[:64], *given, meta(64, dtype=torch.int64), silu=silu)
        )
        tokens = x[:64].unflatten(0, (16, 4))
        slots, row = meta(16, 4, dtype=torch.int64), meta(16, dtype=torch.int64)
        yield Case(f"tokens {name}", partial(causal_conv1d_tokens, tokens, *given, slots, row, row, silu))
