"""The tower in compiled code compared with the same tower computed operation by operation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from compiled import needs_compiled
from minicpm import make_minicpm, random_image, random_video
from towers import TinyTower, assert_same_bits_in_any_company

from families.minicpmv4_6.vision import SlicingVision
from service.model.checkpoint import Checkpoint

pytestmark = needs_compiled
SEEDS = [0, 1, 2, 3, 5, 8]
"""Models with and without a window merger, of several widths."""


class Tiny(TinyTower):
    """A random model's tower, and items of it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.mode = make_minicpm(path, seed, slice_mode=True).mode
        checkpoint, rng = Checkpoint(path), random.Random(seed)
        vision = checkpoint.config.vision
        assert isinstance(vision, SlicingVision) and vision.video_rule is not None
        images = [torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8).view(i.height, i.width, 3)
                  for i in (random_image(rng) for _ in range(5))]  # fmt: skip
        items = [vision.image_rule.patchify(image, torch.float32, keep_bytes=True) for image in images]
        items += [vision.video_rule.patchify(random_video(rng), torch.float32, keep_bytes=True)]
        super().__init__(vision, list(checkpoint.vision_weights()), items)


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_towers_equal_the_operations(tmp_path: Path, seed: int) -> None:
    Tiny(tmp_path, seed).check_compiled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("seed", [1, 2, 5])
def test_an_image_gets_the_same_bits_in_any_company(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    tiny = Tiny(tmp_path, seed)
    largest = max(tokens for item in tiny.items for tokens in item.sequence_tokens)
    padded = tiny.runner(dtype, graphs="on", graph_kinds=None, token_budgets=(largest, 3 * largest))
    assert_same_bits_in_any_company(tiny.runner(dtype), padded, tiny.items)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "int8"])
@pytest.mark.parametrize("native", ["on", "off"])
def test_quantised_towers_give_the_rows_of_their_expanded_weights(tmp_path: Path, kind: str, native: str) -> None:
    Tiny(tmp_path, 7).check_quantised(kind, native)


def test_scratch_is_what_the_plan_says(tmp_path: Path) -> None:
    Tiny(tmp_path, 0).check_scratch()


def test_models_of_both_modes_are_tried(tmp_path: Path) -> None:
    assert {Tiny(tmp_path / str(seed), seed).mode for seed in SEEDS} == {"16x", "4x"}
