"""Cases of conv_replay that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.conv_replay.kernel import conv_advance, conv_replay
from kernels.shapes import Case, ModelShape, meta


def cases(shape: ModelShape) -> Iterator[Case]:
    """A token and three drafts on a ring of 16, and the advance of that ring."""
    if not shape.short_conv:
        return
    taps, channels, row = shape.short_conv, shape.hidden, meta(16, dtype=torch.int64)
    weight = meta(taps, channels)
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        ring = (meta(16, taps - 1, channels, dtype=dtype), meta(16, 16, channels), row, row)
        inputs = meta(16, 4, channels, dtype=dtype)
        yield Case(f"replay {name}", partial(conv_replay, *ring, row, row, inputs, weight, None, 16))
        yield Case(f"advance {name}", partial(conv_advance, *ring, row, row, weight, 16))
