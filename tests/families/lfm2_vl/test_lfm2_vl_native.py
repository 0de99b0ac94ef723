"""The tower in compiled code compared with the same tower computed operation by operation."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled import needs_compiled
from lfm2_vl import make_lfm
from minicpm import random_image
from towers import TinyTower, assert_same_bits_in_any_company

from families.lfm2_vl.vision import TiledVision
from service.model.checkpoint import Checkpoint

pytestmark = needs_compiled
SEEDS = [0, 3, 4, 5, 6, 10]
"""Models with and without the projector's layer norm, of 1, 2 and 3 patches per token along each side."""


class Tiny(TinyTower):
    """A random model's tower, and images of it."""

    def __init__(self, path: Path, seed: int) -> None:
        make_lfm(path, seed, do_image_splitting=True)
        checkpoint, rng = Checkpoint(path), random.Random(seed)
        vision = checkpoint.config.vision
        assert isinstance(vision, TiledVision)
        images = [torch.from_numpy(np.array(random_image(rng))) for _ in range(5)]
        items = [vision.image_rule.patchify(image, torch.float32, keep_bytes=True) for image in images]
        super().__init__(vision, list(checkpoint.vision_weights()), items)


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_towers_equal_the_operations(tmp_path: Path, seed: int) -> None:
    Tiny(tmp_path, seed).check_compiled()


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
    Tiny(tmp_path, 7).check_quantised("fp8", native)


def test_scratch_is_what_the_plan_says(tmp_path: Path) -> None:
    Tiny(tmp_path, 0).check_scratch()


def test_towers_of_every_shape_are_tried(tmp_path: Path) -> None:
    visions = [Tiny(tmp_path / str(seed), seed).vision for seed in SEEDS]
    assert {vision.merge_size for vision in visions} == {1, 2, 3}
    assert (
        {vision.projector_norm for vision in visions} == {vision.projector_bias for vision in visions} == {True, False}
    )
