"""Cases of moe that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.linear.quantised import Quantised
from kernels.moe.experts import Experts
from kernels.moe.kernel import route, route_softmax, run_experts
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """Router and experts at few, some and many tokens; nothing for a model without experts."""
    if not shape.experts:
        return
    size = (shape.experts, shape.intermediate, shape.hidden)
    gate, correction = meta(shape.experts, shape.hidden), meta(shape.experts)
    for dtype in shape.dtypes:
        up, down = meta(*size, dtype=dtype), meta(size[0], size[2], size[1], dtype=dtype)
        experts = Experts(up, down, up, "silu") if shape.gated else Experts(up, down)
        name = str(dtype).removeprefix("torch.")
        for tokens in (64, 4096):
            x = meta(tokens, shape.hidden, dtype=dtype)
            if shape.gated:
                yield Case(f"route softmax {tokens} {name}", partial(route_softmax, x, gate, shape.experts_per_token))
            for groups in () if shape.gated else (1, 4):
                chosen = partial(route, x, gate, correction, shape.experts_per_token, groups, max(groups // 2, 1))
                yield Case(f"route {groups} {tokens} {name}", chosen)
        # The last two numbers have 32 and 80 pairs per expert on average, between few and many.
        between = [average * shape.experts // shape.experts_per_token for average in (32, 80)]
        for tokens in (4, 64, 4096, *between):
            ids = meta(tokens, shape.experts_per_token, dtype=torch.int64)
            weights = meta(tokens, shape.experts_per_token)
            x = meta(tokens, shape.hidden, dtype=dtype)
            yield Case(f"experts {tokens} {name}", partial(run_experts, x, ids, weights, experts))
        x, ids, weights = (
            meta(4096, shape.hidden, dtype=dtype), meta(4096, shape.experts_per_token, dtype=torch.int64),
            meta(4096, shape.experts_per_token),
        )  # fmt: skip
        for kind in KINDS.get(shape.name, ()):
            first, last = _quantised(kind, *size), _quantised(kind, size[0], size[2], size[1])
            experts = Experts(first, last, first if shape.gated else None, "silu" if shape.gated else "relu2")
            for tokens in (4, 4096) if dtype != torch.float32 else (4,):  # in float32 tiles are the same
                given = x[:tokens], ids[:tokens], weights[:tokens]
                yield Case(f"{kind} experts {tokens} {name}", partial(run_experts, *given, experts))


KINDS = {
    "nano-3-omni": ("nvfp4", "fp8", "fp8 blocks", "int8", "int8 groups", "int8 zeros", "int4", "int4 zeros"),
    "qwen3.5-35b-a3b": ("nvfp4", "fp8 blocks"),
    "demo": ("nvfp4", "int4 ordered", "int4 16 ordered"),
}
"""The kinds of weights that each model's experts are compiled with: nearly all kinds for one model, the published kinds
for one with gated experts, and int4 with an input order, in the smallest groups too, for the smallest."""


def _quantised(kind: str, count: int, outputs: int, inner: int) -> Quantised:
    rows, group = (count, outputs), 64 if inner % 64 == 0 else 32
    octets, halves = meta(*rows, inner, dtype=torch.uint8), meta(*rows, inner // 2, dtype=torch.uint8)
    scale, e4m3 = meta(*rows, -(-inner // group)), torch.float8_e4m3fn
    match kind:
        case "nvfp4":
            inner_scale = meta(*rows, -(-inner // 16), dtype=e4m3)
            return Quantised("nvfp4", halves, inner_scale, inner, outer=meta(*rows))
        case "fp8":
            return Quantised("fp8", octets.view(e4m3), meta(*rows, 1), inner, inner)
        case "fp8 blocks":
            return Quantised("fp8", octets.view(e4m3), scale, inner, group)
        case "int8":
            return Quantised("int8", octets.view(torch.int8), meta(*rows, 1), inner, inner)
        case "int8 groups":
            return Quantised("int8", octets.view(torch.int8), scale, inner, group)
        case "int8 zeros":
            return Quantised("int8", octets.view(torch.int8), scale, inner, group, zeros=scale.to(torch.uint8))
        case "int4":
            return Quantised("int4", halves, scale, inner, group)
        case "int4 zeros":
            return Quantised("int4", halves, scale, inner, group, zeros=scale.to(torch.uint8))
        case "int4 16 ordered":
            scale, order = meta(*rows, inner // 16), meta(count, inner, dtype=torch.int64)
            return Quantised("int4", halves, scale, inner, 16, zeros=scale.to(torch.uint8), order=order)
        case "int4 ordered":
            return Quantised("int4", halves, scale, inner, group, order=meta(count, inner, dtype=torch.int64))
    raise AssertionError(kind)
