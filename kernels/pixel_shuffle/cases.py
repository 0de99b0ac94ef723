"""Cases of pixel_shuffle that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.pixel_shuffle.kernel import shuffle_norm
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """Four patches per token, with and without the tower's last norm; with only that norm for towers other than
    RADIO."""
    rows, weight = meta(256, 4, dtype=torch.int64), meta(4 * shape.vit_hidden)
    for dtype in shape.dtypes:
        x, vector = meta(1040, shape.vit_hidden, dtype=dtype), meta(shape.vit_hidden, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        if not shape.radio:
            yield Case(f"merged {name}", partial(shuffle_norm, x, rows, None, 0.0, (vector, vector, 1e-6)))
            continue
        yield Case(f"token {name}", partial(shuffle_norm, x, rows, weight, 1e-5))
        yield Case(f"token final {name}", partial(shuffle_norm, x, rows, weight, 1e-5, (vector, vector, 1e-6)))
