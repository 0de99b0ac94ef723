"""The tower in compiled code compared with the same tower computed operation by operation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import needs_compiled
from lfm2_vl import make_lfm
from minicpm import random_image
from towers import assert_same_bits_in_any_company, encode, rms

from encoder.native import scratch_sizes
from encoder.runner import EncoderOptions, EncoderRunner
from families.lfm2_vl.vision import TiledVision
from kernels.linear import Quantised, quantise
from service.model.checkpoint import Checkpoint

pytestmark = needs_compiled
torch.set_num_threads(1)
SEEDS = [0, 3, 4, 5, 6, 10]
"""Models with and without the projector's layer norm, of 1, 2 and 3 patches per token along each side."""


class Tiny:
    """A random model's tower, and images of it."""

    def __init__(self, path: Path, seed: int) -> None:
        make_lfm(path, seed, do_image_splitting=True)
        checkpoint, rng = Checkpoint(path), random.Random(seed)
        vision = checkpoint.config.vision
        assert isinstance(vision, TiledVision)
        self.vision, self.weights = vision, list(checkpoint.vision_weights())
        images = [torch.from_numpy(np.array(random_image(rng))) for _ in range(5)]
        self.items = [vision.image_rule.patchify(image, torch.float32, keep_bytes=True) for image in images]

    def runner(self, dtype: torch.dtype, *, weights: Any = None, **options: Any) -> EncoderRunner:
        given: dict[str, Any] = {"graphs": "off", "native": "on", **options}
        return EncoderRunner(self.vision, EncoderOptions(dtype=dtype, **given), weights or self.weights)


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_towers_equal_the_operations(tmp_path: Path, seed: int) -> None:
    tiny = Tiny(tmp_path, seed)
    fast, slow = (encode(tiny.runner(torch.float32, native=mode), tiny.items) for mode in ("on", "off"))
    for found, wanted in zip(fast, slow, strict=True):
        assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())
    rounded, plain = (encode(tiny.runner(torch.bfloat16, native=mode), tiny.items) for mode in ("on", "off"))
    assert rms(rounded, slow) <= 1.2 * rms(plain, slow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("seed", [0, 3])
def test_an_image_gets_the_same_bits_in_any_company(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    tiny = Tiny(tmp_path, seed)
    assert tiny.vision.projector_norm is (seed == 0)
    largest = max(tokens for item in tiny.items for tokens in item.sequence_tokens)
    budgets = largest, min(3 * largest, tiny.vision.max_image_tokens)
    padded = tiny.runner(dtype, graphs="on", graph_kinds=None, token_budgets=budgets)
    assert_same_bits_in_any_company(tiny.runner(dtype), padded, tiny.items)


@pytest.mark.parametrize("native", ["on", "off"])
def test_quantised_towers_give_the_rows_of_their_expanded_weights(tmp_path: Path, native: str) -> None:
    tiny = Tiny(tmp_path, 7)
    stored: dict[str, Any] = {
        name: quantise(weight, "fp8") if "mlp.fc" in name and weight.dim() == 2 else weight
        for name, weight in tiny.weights
        if isinstance(weight, torch.Tensor)
    }
    assert any(isinstance(weight, Quantised) for weight in stored.values())
    expanded = {name: w.dequantise() if isinstance(w, Quantised) else w for name, w in stored.items()}
    found, exact = (
        encode(tiny.runner(torch.float32, weights=list(each.items()), native=native), tiny.items)
        for each in (stored, expanded)
    )
    assert rms(found, exact) < 1e-5 * float(torch.cat(exact).square().mean().sqrt())


def test_scratch_is_what_the_plan_says(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, 0)
    plan = tiny.runner(torch.bfloat16).plan()
    assert plan["scratch_bytes"] == sum(scratch_sizes(plan["rows"][-1], tiny.vision, torch.bfloat16))  # type: ignore[index]


def test_towers_of_every_shape_are_tried(tmp_path: Path) -> None:
    visions = [Tiny(tmp_path / str(seed), seed).vision for seed in SEEDS]
    assert {vision.merge_size for vision in visions} == {1, 2, 3}
    assert (
        {vision.projector_norm for vision in visions} == {vision.projector_bias for vision in visions} == {True, False}
    )
