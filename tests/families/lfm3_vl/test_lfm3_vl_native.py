"""The tower in compiled code compared with the same tower computed operation by operation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from compiled import needs_compiled
from lfm3_vl import make_lfm3
from qwen_vision import random_grids, random_item
from towers import TinyTower, assert_same_bits_in_any_company

from service.model.checkpoint import Checkpoint

pytestmark = needs_compiled
SEEDS = [0, 1, 2, 3, 4]


class Tiny(TinyTower):
    """A random model's tower, and images and clips of it."""

    def __init__(self, path: Path, seed: int) -> None:
        vision = make_lfm3(path, seed).vision
        grids = random_grids(random.Random(seed), 5, 6, vision.merge_size)
        items = [random_item(vision, grid, place, pairs=place % 3) for place, grid in enumerate(grids)]
        super().__init__(vision, list(Checkpoint(path).vision_weights()), items)


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_towers_equal_the_operations(tmp_path: Path, seed: int) -> None:
    Tiny(tmp_path, seed).check_compiled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("seed", [0, 3])
def test_an_image_gets_the_same_bits_in_any_company(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    tiny = Tiny(tmp_path, seed)
    largest = max(tokens for item in tiny.items for tokens in item.sequence_tokens)
    padded = tiny.runner(dtype, graphs="on", graph_kinds=None, token_budgets=(largest, 3 * largest))
    assert_same_bits_in_any_company(tiny.runner(dtype), padded, tiny.items)


def test_scratch_is_what_the_plan_says(tmp_path: Path) -> None:
    Tiny(tmp_path, 0).check_scratch()


def test_towers_of_every_shape_are_tried(tmp_path: Path) -> None:
    visions = [Tiny(tmp_path / str(seed), seed).vision for seed in SEEDS]
    assert {kind for vision in visions for kind in vision.layer_types} == {"conv", "full_attention"}  # type: ignore[attr-defined]
    assert any(vision.num_heads > vision.num_key_value_heads > 1 for vision in visions)  # type: ignore[attr-defined]
