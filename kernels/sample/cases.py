"""Cases of sample that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from kernels.sample.kernel import accept_drafts, sample
from kernels.sample.rows import Masks, RowParams
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """Draws, without and with masks, and the acceptance of three drafts."""
    whole, double, single = (meta(64, dtype=kind) for kind in (torch.int64, torch.float64, torch.float32))
    params = RowParams(single, whole, double, double, whole, whole, whole)
    for dtype in dict.fromkeys((*shape.dtypes, torch.float32)):
        logits = meta(64, shape.vocab, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        yield Case(f"draw {name}", partial(sample, logits, params))
        masks = Masks(meta(32, -(-shape.vocab // 32), dtype=torch.int32), whole)
        yield Case(f"draw masked {name}", partial(sample, logits, replace(params, masks=masks)))
    drafts = meta(64, 3, dtype=torch.int64)
    yield Case("accept", partial(accept_drafts, meta(64, 4, dtype=torch.int64), drafts, whole))
