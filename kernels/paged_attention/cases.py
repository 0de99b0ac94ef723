"""Cases of paged_attention that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.paged_attention.kernel import decode_attention, extend_attention, write_kv
from kernels.shapes import Case, ModelShape, meta

PAGE = 16
LONGEST = 8192
WINDOW = 256


def cases(shape: ModelShape) -> Iterator[Case]:
    """Decode with and without the write, prompt chunks, and rows of a few drafts; with and without a window."""
    scale = shape.head_dim**-0.5
    tables = meta(64, LONGEST // PAGE, dtype=torch.int64)
    rows = meta(64, dtype=torch.int64)
    starts = meta(65, dtype=torch.int64)
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        # As in the arena: all layers of a page are contiguous.
        pool = meta(100, 4, 2, PAGE, shape.kv_heads, shape.head_dim, dtype=dtype)[:, 1]

        def new(tokens: int, dtype: torch.dtype = dtype) -> tuple[Tensor, ...]:
            heads = [shape.heads, shape.kv_heads, shape.kv_heads]
            return meta(tokens, sum(heads), shape.head_dim, dtype=dtype).split(heads, dim=1)

        q, k, v = new(64)
        decode = partial(decode_attention, q, pool, tables, rows, scale)
        yield Case(f"decode {name}", partial(decode, LONGEST))
        yield Case(f"decode short {name}", partial(decode, 256))
        yield Case(f"decode write {name}", partial(decode, LONGEST, (k, v, rows)))
        yield Case(f"decode window {name}", partial(decode, LONGEST, (k, v, rows), WINDOW))
        yield Case(f"write {name}", partial(write_kv, pool, k, v, rows))
        for kind, tokens in (("speculative", 256), ("chunks", 512), ("prefill", 4096)):
            q, k, v = new(tokens)
            given = (q, k, v, pool, tables, rows, starts, scale, meta(tokens, dtype=torch.int64))
            yield Case(f"{kind} {name}", partial(extend_attention, *given))
            if kind != "chunks":
                yield Case(f"{kind} window {name}", partial(extend_attention, *given, WINDOW))
