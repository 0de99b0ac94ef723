"""What `kernels.aot` compiles of causal_conv1d."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.causal_conv1d.kernel import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.scan_tables import ScanTables
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """A prefill of two rows, one token a row, and a step with three drafts a row."""
    if not shape.mamba_heads:
        return
    channels, taps = shape.conv_channels, shape.conv
    width = shape.mamba_inner + channels + shape.mamba_heads
    weight, bias = meta(taps, channels), meta(channels)
    tables = ScanTables.of([300, 50], [0, 7], shape.chunk, device="meta")
    two = (meta(2, dtype=torch.int64), meta(2, dtype=torch.bool), meta(3, dtype=torch.int64))
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        pool = meta(16, 4 * taps * channels, dtype=dtype)[:, : (taps - 1) * channels].unflatten(1, (taps - 1, channels))
        x = meta(350, width, dtype=dtype)[:, shape.mamba_inner : shape.mamba_inner + channels]
        given = (weight, bias, pool)
        yield Case(f"packed {name}", partial(causal_conv1d, x, *given, *two, (), tables))
        yield Case(f"update {name}", partial(causal_conv1d_update, x[:64], *given, meta(64, dtype=torch.int64)))
        tokens = x[:64].unflatten(0, (16, 4))
        slots, row = meta(16, 4, dtype=torch.int64), meta(16, dtype=torch.int64)
        yield Case(f"tokens {name}", partial(causal_conv1d_tokens, tokens, *given, slots, row, row))
