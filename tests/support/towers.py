"""Checks of towers in compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from encoder.item import EncoderItem
from encoder.runner import EncoderRunner


def encode(runner: EncoderRunner, items: Sequence[EncoderItem]) -> list[torch.Tensor]:
    """The rows of each item."""
    out = [torch.full((i.tokens, runner.spec.row_width), math.nan, dtype=runner.options.dtype) for i in items]
    runner.encode(items, out)
    return out


def rms(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Root mean square of all differences."""
    return float((torch.cat(found).double() - torch.cat(exact).double()).square().mean().sqrt())


def assert_same_bits_in_any_company(runner: EncoderRunner, padded: EncoderRunner, items: list[EncoderItem]) -> None:
    """Alone, packed with others in any order, in the graphs' padding of `padded`, with any number of threads,
    interrupted between layers."""
    alone = [encode(runner, [item])[0] for item in items]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for packed in (encode(runner, items), encode(runner, items[::-1])[::-1], encode(padded, items)):
                for rows, expected in zip(packed, alone, strict=True):
                    assert torch.equal(rows, expected)
    finally:
        torch.set_num_threads(1)
    assert any(name.startswith("replays") for name in padded.stats())
    out = [torch.empty_like(rows) for rows in alone]
    job = runner.begin(items, out)
    while job.step(0.0):
        pass
    assert all(torch.equal(rows, expected) for rows, expected in zip(out, alone, strict=True))
