"""Cases of rotary that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.rotary.kernel import norm_rotate, rotate
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """Queries and keys of a product that also has values and gates; positions with one axis, and with several; heads of
    a tower."""
    if not shape.rope_dims:
        return
    count, width = shape.heads + shape.kv_heads, shape.head_dim
    table, weight = meta(4096, 2, min(shape.rope_dims, width) // 2), meta(width)
    axes = shape.rope_axes or tuple(i % 3 for i in range(table.shape[-1]))
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        x = meta(64, 2 * count, width, dtype=dtype)[:, :count]
        at = meta(64, 3, dtype=torch.int64)
        yield Case(f"norm {name}", partial(norm_rotate, x, shape.heads, (weight, weight), 1e-6, table, at, axes))
        yield Case(f"plain {name}", partial(rotate, x, table, at[:, :1]))
        heads, size = shape.vit_heads, shape.vit_hidden // shape.vit_heads
        qkv, turns = meta(64, 3 * heads, size, dtype=dtype), meta(4096, 2, size // 2)
        yield Case(f"tower {name}", partial(norm_rotate, qkv[:, : 2 * heads], heads, None, 0.0, turns, at[:, :1]))
