"""Cases of linear that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.linear.kernel import plain_linear, quantised_linear
from kernels.linear.quantised import Quantised
from kernels.shapes import Case, ModelShape, meta

MODELS = ("nano-3-omni", "demo")


def cases(shape: ModelShape) -> Iterator[Case]:
    """A projection from the residual stream, with the rows of a step and of a prompt, for every kind of weight.

    Of a model's sizes it matters only whether they are multiples of a block, so one large and one small model suffice.
    """
    if shape.name not in MODELS:
        return
    outputs, inner = shape.heads * shape.head_dim, shape.hidden
    group = 128 if inner % 128 == 0 else 64 if inner % 64 == 0 else 32
    groups = -(-inner // group)
    bytes_, halves = torch.uint8, meta(outputs, inner // 2, dtype=torch.uint8)
    scale, e4m3 = meta(outputs, groups), torch.float8_e4m3fn
    weights = {
        "int8": Quantised("int8", meta(outputs, inner, dtype=torch.int8), meta(outputs, 1), inner, inner),
        "int8 groups": Quantised("int8", meta(outputs, inner, dtype=torch.int8), scale, inner, group),
        "int8 zeros": Quantised(
            "int8", meta(outputs, inner, dtype=torch.int8), scale, inner, group,
            zeros=meta(outputs, groups, dtype=bytes_),
        ),
        "int4": Quantised("int4", halves, scale, inner, group),
        "int4 zeros": Quantised("int4", halves, scale, inner, group, zeros=meta(outputs, groups, dtype=bytes_)),
        "fp8": Quantised("fp8", meta(outputs, inner, dtype=e4m3), meta(outputs, 1), inner, inner),
        "fp8 blocks": Quantised("fp8", meta(outputs, inner, dtype=e4m3), scale, inner, group),
        "nvfp4": Quantised(
            "nvfp4", halves, meta(outputs, -(-inner // 16), dtype=e4m3), inner, outer=meta(outputs)
        ),
    }  # fmt: skip
    if shape.name == "demo":
        small = meta(outputs, inner // 16)
        weights["int4 16"] = Quantised("int4", halves, small, inner, 16, zeros=small.to(bytes_))
    for dtype in shape.dtypes:
        for rows in (1, 64):
            x, name = meta(rows, inner, dtype=dtype), str(dtype).removeprefix("torch.")
            for kind, weight in weights.items():
                yield Case(f"{kind} {rows} {name}", partial(quantised_linear, x, weight, None))
        if dtype.itemsize == 2:
            sizes = [(rows, outputs) for rows in (1, 20, 50, 100, 200, 400, 4096)]
            for rows, count in [*sizes, (100, shape.vocab), (200, shape.vocab)]:
                x, plain = meta(rows, inner, dtype=dtype), meta(count, inner, dtype=dtype)
                yield Case(f"plain {rows} x {count} {name}", partial(plain_linear, x, plain, None))
