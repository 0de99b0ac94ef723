"""Cases of state_replay that `kernels.aot` compiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from kernels.selective_state_update.cases import states
from kernels.shapes import Case, ModelShape, meta
from kernels.state_replay.kernel import replay_advance, replay_tokens
from kernels.state_replay.reference import MambaTerms


def cases(shape: ModelShape) -> Iterator[Case]:
    """A token and three drafts on a ring of 16, and the advance of that ring."""
    if not shape.mamba_heads:
        return
    channels, head, row = shape.conv_channels, meta(shape.mamba_heads), meta(16, dtype=torch.int64)
    size = channels + shape.mamba_heads
    terms = MambaTerms(meta(shape.conv, channels), meta(channels), head, head, head, shape.groups, shape.state)
    for dtype in shape.dtypes:
        name = str(dtype).removeprefix("torch.")
        windows = meta(16, shape.conv - 1, channels, dtype=dtype)
        rings, inputs = meta(16, 16, size, dtype=dtype), meta(16, 4, size, dtype=dtype)
        given = (states(shape), windows, rings, row, row)
        yield Case(f"tokens {name}", partial(replay_tokens, *given, row, row, inputs, terms, 16))
        yield Case(f"advance {name}", partial(replay_advance, *given, row, row, terms, 16))
