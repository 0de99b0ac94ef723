"""Cases of varlen_attention that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.shapes import Case, ModelShape, meta
from kernels.varlen_attention.kernel import varlen_attention


def cases(shape: ModelShape) -> Iterator[Case]:
    """The vision tower, whose queries, keys and values are views of one product."""
    width = shape.vit_hidden // shape.vit_heads
    for dtype in shape.dtypes:
        q, k, v = meta(4160, 3, shape.vit_heads, width, dtype=dtype).unbind(1)
        bounds = meta(9, dtype=torch.int32)
        name = str(dtype).removeprefix("torch.")
        yield Case(f"{width} {name}", partial(varlen_attention, q, k, v, bounds, 4160, scale=width**-0.5))
