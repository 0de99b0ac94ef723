"""Cases of rms_norm that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kernels.rms_norm.kernel import add_rms_norm, rms_norm
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """The residual stream of the decoder."""
    weight = meta(shape.hidden)
    for dtype in shape.dtypes:
        x = meta(64, shape.hidden, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        yield Case(f"norm {name}", partial(rms_norm, x, weight, 1e-5))
        yield Case(f"add {name}", partial(add_rms_norm, x, x, weight, 1e-5))
