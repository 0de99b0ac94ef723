"""Checks of towers in compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from encoder.item import EncoderItem
from encoder.native import scratch_sizes
from encoder.plan import describe
from encoder.runner import EncoderOptions, EncoderRunner
from families import VisionSpec
from kernels.linear import Quantised, quantise


class TinyTower:
    """A random model's tower, and items of it."""

    def __init__(
        self, vision: VisionSpec, weights: Sequence[tuple[str, torch.Tensor | Quantised]], items: list[EncoderItem]
    ) -> None:
        self.vision, self.weights, self.items = vision, list(weights), items

    def runner(self, dtype: torch.dtype, *, weights: Any = None, **options: Any) -> EncoderRunner:
        given: dict[str, Any] = {"graphs": "off", "native": "on", **options}
        return EncoderRunner(self.vision, EncoderOptions(dtype=dtype, **given), weights or self.weights)

    def check_compiled(self) -> None:
        """Compiled code has the rows of the operations in float32, and in bfloat16 about as large an error."""
        fast, slow = (encode(self.runner(torch.float32, native=mode), self.items) for mode in ("on", "off"))
        for found, wanted in zip(fast, slow, strict=True):
            assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())
        rounded, plain = (encode(self.runner(torch.bfloat16, native=mode), self.items) for mode in ("on", "off"))
        assert rms(rounded, slow) <= 1.2 * rms(plain, slow)

    def check_quantised(self, kind: str, native: str) -> None:
        """Quantised MLPs give the rows of their expanded weights."""
        stored: dict[str, Any] = {
            name: quantise(weight, kind) if "mlp.fc" in name and weight.dim() == 2 else weight
            for name, weight in self.weights
            if isinstance(weight, torch.Tensor)
        }
        assert any(isinstance(weight, Quantised) for weight in stored.values())
        expanded = {name: w.dequantise() if isinstance(w, Quantised) else w for name, w in stored.items()}
        found, exact = (
            encode(self.runner(torch.float32, weights=list(each.items()), native=native), self.items)
            for each in (stored, expanded)
        )
        assert rms(found, exact) < 1e-5 * float(torch.cat(exact).square().mean().sqrt())

    def check_scratch(self) -> None:
        """The plan has the scratch memory of the largest launch."""
        runner = self.runner(torch.bfloat16)
        rows = describe(self.vision, runner.budgets, torch.bfloat16)[-1].tower_rows
        assert runner.tower.native.bytes == sum(scratch_sizes(rows, self.vision, torch.bfloat16))


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
    for threads in (2, 3, 64, 1):
        torch.set_num_threads(threads)
        for packed in (encode(runner, items), encode(runner, items[::-1])[::-1], encode(padded, items)):
            for rows, expected in zip(packed, alone, strict=True):
                assert torch.equal(rows, expected)
    assert any(name.startswith("replays") for name in padded.stats())
    out = [torch.empty_like(rows) for rows in alone]
    job = runner.begin(items, out)
    while job.step(0.0):
        pass
    assert all(torch.equal(rows, expected) for rows, expected in zip(out, alone, strict=True))
