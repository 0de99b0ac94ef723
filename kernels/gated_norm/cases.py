"""Cases of gated_norm that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kernels.gated_norm.kernel import gated_norm
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """The end of a mixer; the gate is a part of the rows of the projection before it."""
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        if shape.mamba_heads:
            inner, group = shape.mamba_inner, shape.mamba_inner // shape.groups
            y, gate = meta(64, inner, dtype=dtype), meta(64, 3 * inner + shape.mamba_heads, dtype=dtype)[:, :inner]
            yield Case(name, partial(gated_norm, y, gate, meta(inner), group, 1e-5))
            yield Case(f"gate only {name}", partial(gated_norm, y, gate, None, group, 1e-5))
        if heads := shape.delta_value_heads:
            inner = heads * shape.delta_head_dim
            y, gate = meta(64, inner, dtype=dtype), meta(64, 2 * inner + shape.delta_channels, dtype=dtype)[:, :inner]
            first = partial(gated_norm, y, gate, meta(inner), shape.delta_head_dim, 1e-6, norm_first=True)
            yield Case(f"norm first {name}", first)
