"""Positions of prompts equal transformers' `get_rope_index`."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from qwen_vision import random_grids
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from decoder.positions import positions_of
from families.qwen3_5.positions import prompt_positions


def oracle(merge: int) -> SimpleNamespace:
    """The attributes of a model that `get_rope_index` reads."""
    made = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge)))
    made.get_vision_position_ids = Qwen3_5Model.get_vision_position_ids.__get__(made)
    return made


@pytest.mark.parametrize("seed", range(60))
def test_positions_are_those_of_transformers(seed: int) -> None:
    rng = random.Random(seed)
    merge = rng.choice([1, 2, 3])
    kinds: list[int] = [0] * rng.randint(0 if seed % 3 else 1, 9)
    blocks, images, videos = [], [], []
    for _ in range(rng.randint(0, 4)):
        (grid,) = random_grids(rng, 1, 7, merge)
        clip = rng.random() < 0.4
        frames = rng.randint(1, 4) if clip else 1
        (videos if clip else images).append([frames, *grid])
        for _ in range(frames):
            kinds += [0] * rng.randint(1, 6)
            blocks.append((len(kinds), grid))
            kinds += [2 if clip else 1] * (grid[0] * grid[1] // merge**2)
        kinds += [0] * rng.randint(1, 5)
    kinds += [0]
    wanted, delta = Qwen3_5Model.get_rope_index(
        oracle(merge),  # type: ignore[arg-type]
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        torch.tensor(images) if images else None,  # type: ignore[arg-type]
        torch.tensor(videos) if videos else None,  # type: ignore[arg-type]
    )
    found = prompt_positions(len(kinds), blocks, merge_size=merge)
    assert torch.equal(torch.tensor(found.prompt).T, wanted[:, 0])
    assert found.delta == int(delta)
    after = positions_of(found, len(kinds), len(kinds) + 3, 3)
    assert after == [(len(kinds) + int(delta) + step,) * 3 for step in range(3)]


def test_equally_many_tokens_of_other_grids_have_other_positions() -> None:
    wide, tall = (prompt_positions(20, [(3, grid)], merge_size=2) for grid in ((4, 12), (12, 4)))
    assert wide.prompt[:3] == tall.prompt[:3] and wide.prompt[3:15] != tall.prompt[3:15]
    square = prompt_positions(20, [(3, (6, 8))], merge_size=2)
    assert square.delta != wide.delta == tall.delta


@pytest.mark.parametrize("blocks", [[(9, (2, 4))], [(1, (2, 4)), (2, (2, 2))], [(-1, (2, 2))], [(1, (0, 2))]], ids=str)
def test_blocks_outside_the_prompt_are_refused(blocks: list[tuple[int, tuple[int, int]]]) -> None:
    with pytest.raises(ValueError, match="image tokens at -?[0-9]+ do not lie in places"):
        prompt_positions(10, blocks, merge_size=2)
