"""Cases of moe that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

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
        x = meta(64, shape.hidden, dtype=dtype)
        if shape.gated:
            yield Case(f"route softmax {name}", partial(route_softmax, x, gate, shape.experts_per_token))
        for groups in () if shape.gated else (1, 4):
            chosen = partial(route, x, gate, correction, shape.experts_per_token, groups, max(groups // 2, 1))
            yield Case(f"route {groups} {name}", chosen)
        for tokens in (4, 64, 4096):
            ids = meta(tokens, shape.experts_per_token, dtype=torch.int64)
            weights = meta(tokens, shape.experts_per_token)
            x = meta(tokens, shape.hidden, dtype=dtype)
            yield Case(f"experts {tokens} {name}", partial(run_experts, x, ids, weights, experts))
