"""Cases of gated_delta that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.gated_delta.kernel import (
    delta_gates,
    gated_delta_advance,
    gated_delta_replay,
    gated_delta_scan,
    gated_delta_tokens,
    gated_delta_update,
)
from kernels.gated_delta.reference import DeltaTerms
from kernels.scan_tables import ScanTables
from kernels.shapes import Case, ModelShape, meta


def _mixed(shape: ModelShape, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the convolution outputs them: parts of the same rows."""
    terms = DeltaTerms(meta(1), meta(shape.delta_value_heads), meta(1), shape.delta_key_heads, shape.delta_head_dim)
    return terms.split(meta(rows, shape.delta_channels, dtype=dtype))


def cases(shape: ModelShape) -> Iterator[Case]:
    """One token per row; a step with three drafts, in state slots and on a ring of 16; the advance of that ring; the
    gates; and a prompt of two rows that saves one state."""
    if not shape.delta_value_heads:
        return
    heads, width, channels = shape.delta_value_heads, shape.delta_head_dim, shape.delta_channels
    size, row, head = heads * width * width, meta(16, dtype=torch.int64), meta(heads)
    pool = meta(16, 2 * size)[:, :size].unflatten(1, (heads, width, width))
    terms = DeltaTerms(meta(shape.conv, channels), head, head, shape.delta_key_heads, width)
    tables = ScanTables.of([300, 50], [0, 7], shape.chunk, [(0, 70, 3)], device="meta")
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        b, a = meta(64, 3 * channels, dtype=dtype)[:, -2 * heads :].split(heads, 1)
        given = (*_mixed(shape, 64, dtype), b, a)
        slots = meta(64, dtype=torch.int64)
        yield Case(f"update {name}", partial(gated_delta_update, pool, slots, *given, head, head))
        q, k, v, b_rows, a_rows = (part.unflatten(0, (16, 4)) for part in given)
        where = (meta(16, 4, dtype=torch.int64), row, row)
        yield Case(f"tokens {name}", partial(gated_delta_tokens, pool, *where, q, k, v, b_rows, a_rows, head, head))
        windows = meta(16, shape.conv - 1, channels, dtype=dtype)
        rings, inputs = (meta(16, steps, channels + 2 * heads, dtype=dtype) for steps in (16, 4))
        ring = (pool, windows, rings, row, row)
        yield Case(f"replay {name}", partial(gated_delta_replay, *ring, row, row, inputs, terms, 16))
        yield Case(f"advance {name}", partial(gated_delta_advance, *ring, row, row, terms, 16))
        yield Case(f"gates {name}", partial(delta_gates, b, a, head, head))
        prompt = (*_mixed(shape, 350, dtype), meta(350, heads), meta(350, heads))
        initial = (meta(2, dtype=torch.int64), meta(2, dtype=torch.bool))
        yield Case(f"scan {name}", partial(gated_delta_scan, pool, *initial, *prompt, (), (), tables))
