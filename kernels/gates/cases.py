"""Cases of gates that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kernels.gates.kernel import add_gated, sigmoid_gate, swiglu
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """For models with gated attention and gated MLPs; the gates of attention are parts of wider rows."""
    if not shape.delta_value_heads:
        return
    width = shape.heads * shape.head_dim
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        gate = meta(64, 3 * width, dtype=dtype)[:, width : 2 * width]
        yield Case(f"sigmoid {name}", partial(sigmoid_gate, meta(64, width, dtype=dtype), gate))
        of_heads = meta(64, 3 * shape.heads, dtype=dtype)[:, : shape.heads]
        yield Case(f"sigmoid heads {name}", partial(sigmoid_gate, meta(64, width, dtype=dtype), of_heads))
        yield Case(f"swiglu {name}", partial(swiglu, meta(64, 2 * shape.intermediate, dtype=dtype)))
        rows = meta(64, shape.hidden, dtype=dtype)
        yield Case(f"add {name}", partial(add_gated, rows, rows, rows, meta(1, shape.hidden)))
