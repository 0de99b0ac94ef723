"""What `kernels.aot` compiles of gated_norm."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kernels.gated_norm.kernel import gated_norm
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """The end of a mixer; the gate is a part of the rows of the projection before it."""
    if not shape.mamba_heads:
        return
    channels, weight = shape.mamba_inner, meta(shape.mamba_inner)
    for dtype in shape.dtypes:
        gate = meta(64, channels + shape.conv_channels + shape.mamba_heads, dtype=dtype)[:, :channels]
        y = meta(64, channels, dtype=dtype)
        yield Case(
            str(dtype).removeprefix("torch."), partial(gated_norm, y, gate, weight, channels // shape.groups, 1e-5)
        )
