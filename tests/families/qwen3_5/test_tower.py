"""The tower against transformers: rows of images and clips, positions, rotations, packing, graphs."""

from __future__ import annotations

import random

import pytest
import torch
from qwen_vision import TinyQwen, random_grids, random_item, tiny_qwen
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from encoder.item import EncoderItem
from encoder.runner import EncoderOptions, EncoderRunner


def runner(tiny: TinyQwen, **options: object) -> EncoderRunner:
    given = {"dtype": torch.float32, "graphs": "off", "native": "off", "max_tokens_per_step": 64, **options}
    return EncoderRunner(tiny.config, EncoderOptions(**given), tiny.weights.items())  # type: ignore[arg-type]


def encode(made: EncoderRunner, items: list[EncoderItem]) -> list[torch.Tensor]:
    out = [torch.full((item.tokens, made.spec.row_width), 7.0, dtype=made.options.dtype) for item in items]
    made.encode(items, out)
    return out


def close(found: torch.Tensor, wanted: torch.Tensor, of_scale: float = 1e-4) -> bool:
    return float((found - wanted).abs().max()) <= of_scale * float(wanted.abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 128, "num_heads": 2},  # heads of 64
        {"hidden_size": 144, "num_heads": 2, "num_position_embeddings": 2304},  # heads of 72
        {"patch_size": 8, "spatial_merge_size": 3, "hidden_act": "gelu"},
        {"temporal_patch_size": 3, "depth": 1},
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}, "spatial_merge_size": 1},
    ],
    ids=str,
)
def test_rows_are_those_of_transformers(changes: dict[str, int]) -> None:
    tiny = tiny_qwen(1, **changes)
    rng = random.Random(3)
    merge = tiny.config.merge_size
    images = [random_item(tiny.config, grid, seed) for seed, grid in enumerate(random_grids(rng, 4, merge=merge))]
    clip = random_item(tiny.config, (2 * merge, 3 * merge), 9, pairs=3)
    items = [*images, clip]
    for found, wanted in zip(encode(runner(tiny), items), tiny.rows(items), strict=True):
        assert close(found, wanted)


@pytest.mark.parametrize("grid", [(2, 2), (2, 14), (14, 14), (6, 20), (100, 2)], ids=str)
@pytest.mark.parametrize("merge", [1, 2])
def test_positions_and_rotations_are_those_of_transformers(grid: tuple[int, int], merge: int) -> None:
    tiny = tiny_qwen(spatial_merge_size=merge)
    tower, thw = runner(tiny).tower, torch.tensor([[1, *grid]])
    taps, weights = get_vision_interpolation_indices_and_weights(
        thw, 7, mode="bilinear", align_corners=True, spatial_merge_size=merge
    )
    wanted = (tiny.weights["visual.pos_embed.weight"][taps] * weights[:, :, None]).sum(1)
    assert torch.allclose(tower.positions(grid), wanted, rtol=0, atol=1e-6)
    cos, sin = tiny.oracle.rotary_pos_emb(torch.zeros(1), get_vision_position_ids(thw, merge))
    half = tiny.config.head_dim // 2
    assert torch.equal(tower.rotations(grid), torch.cat((cos[:, :half], sin[:, :half]), 1))  # type: ignore[attr-defined]


def test_bfloat16_adds_positions_that_were_summed_in_float32() -> None:
    tiny = tiny_qwen(dtype=torch.bfloat16)
    positions = runner(tiny, dtype=torch.bfloat16).tower.positions((4, 6))
    table = {name: tensor.float() for name, tensor in tiny.weights.items()}
    exact = EncoderRunner(tiny.config, EncoderOptions(dtype=torch.float32, graphs="off", native="off"), table.items())
    assert torch.equal(positions, exact.tower.positions((4, 6)).bfloat16())


def test_a_still_is_the_clip_of_its_frame_repeated() -> None:
    tiny = tiny_qwen()
    image = random_item(tiny.config, (4, 6))
    patches = image.patches.view(-1, 3, 1, 16).expand(-1, -1, 2, -1).reshape(-1, 96)
    clip = EncoderItem((4, 6), patches, kind="video", num_frames=2, order=image.order)
    still, moving = encode(runner(tiny), [image, clip])
    assert close(still, moving, 1e-5)


def test_frames_of_a_clip_do_not_see_each_other() -> None:
    tiny = tiny_qwen()
    clip = random_item(tiny.config, (4, 4), pairs=2)
    changed = clip.patches.clone()
    changed[16:] += 1
    other = EncoderItem(clip.grid, changed, kind="video", num_sequences=2, num_frames=4, order=clip.order, merge_size=2)
    before, after = encode(runner(tiny), [clip, other])
    assert torch.equal(before[:4], after[:4]) and not torch.equal(before[4:], after[4:])


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_packed_is_alone_and_a_graph_is_eager(graphs: str) -> None:
    tiny = tiny_qwen(2)
    items = [random_item(tiny.config, grid, seed) for seed, grid in enumerate(random_grids(random.Random(5), 6))]
    items.append(random_item(tiny.config, (4, 4), 11, pairs=2))
    options = {"graphs": graphs, "token_budgets": (16, 64), "graph_kinds": None}
    packed = encode(runner(tiny, **options), items)
    eager = runner(tiny, max_tokens_per_step=64)
    for found, item in zip(packed, items, strict=True):
        (alone,) = encode(eager, [item])
        assert torch.allclose(found, alone, rtol=0, atol=2e-5)


def test_patches_in_another_order_are_refused() -> None:
    tiny = tiny_qwen()
    item = random_item(tiny.config, (4, 4))
    rows = EncoderItem(item.grid, item.patches)
    with pytest.raises(ValueError, match="image 0: patches by rows, but the tower takes blocks"):
        encode(runner(tiny), [rows])


def test_missing_weights_are_named() -> None:
    tiny = tiny_qwen()
    weights = {name: tensor for name, tensor in tiny.weights.items() if "merger.norm" not in name}
    with pytest.raises(ValueError, match=r"2 vision weights are missing, such as \['visual.merger.norm.bias'"):
        tiny.config.build(weights.items(), dtype=torch.float32, device=torch.device("cpu"))
