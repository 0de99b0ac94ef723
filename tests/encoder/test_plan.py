"""The plan's numbers match the buffers that a runner allocates."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_encoder import TinyTower, tiny_tower

from encoder.budget import EncoderBudgets, graph_shape, resolve_budgets
from encoder.plan import activation_bytes, buffer_bytes, buffer_sizes, describe
from encoder.runner import EncoderOptions, EncoderRunner
from families.nemotron_h_omni.vision import RadioVision


@pytest.fixture(scope="module")
def tiny() -> TinyTower:
    return tiny_tower(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planned_bytes_are_the_arena_s(tiny: TinyTower, dtype: torch.dtype) -> None:
    options = EncoderOptions(dtype=dtype, graphs="on", token_budgets=(5, 13, 60), max_images=4)
    runner = EncoderRunner(tiny.config, options, tiny.weights.items())
    rows = describe(tiny.config, runner.budgets, dtype)
    arena = runner.lanes["image"].graphs.arena  # type: ignore[union-attr]
    assert rows[-1].buffer_bytes == arena.bytes
    assert [row.capacity for row in rows] == [shape.capacity for shape in arena.shapes.values()] == [8, 16, 60]
    assert [row.tower_rows for row in rows] == [shape.rows for shape in arena.shapes.values()]
    assert [row.tower_rows for row in rows] == [4 * 8 + 21, 4 * 16 + 21, 4 * 60 + 21]
    assert [row.rows_per_image for row in rows] == [2, 4, 15]
    assert [row.sequences for row in rows] == [5, 5, 5]
    for row in rows:
        view = arena.view(row.budget)
        assert row.buffer_bytes == sum(t.numel() * t.element_size() for t in view.values())
    runner.close()


def test_worked_bytes_of_the_released_tower() -> None:
    config = RadioVision()
    budgets = resolve_budgets(config.min_image_tokens, config.max_image_tokens)
    rows = describe(config, budgets, torch.bfloat16)
    assert [row.budget for row in rows] == [256, 512, 1024, 2048, 3328]
    patches, tower_rows = 4 * 3328, 4 * 3328 + 10 * 13 + 1
    expected = 2 * patches * (768 + 1280) + 8 * tower_rows + 4 * 15 + 8 * 4 * 3328 + 2 * 3328 * 4096
    assert rows[-1].buffer_bytes == expected
    assert rows[-1].activation_bytes == tower_rows * (2 * 1280 + 2 * 5120) * 2


def test_one_arena_takes_less_than_buffers_apart() -> None:
    """If each budget is twice the one before, the largest is about half of all budgets together."""
    config = RadioVision(min_num_patches=256, max_num_patches=32768, max_model_len=16384)
    rows = describe(config, resolve_budgets(64, 8192), torch.bfloat16)
    assert sum(row.buffer_bytes for row in rows) > 1.9 * rows[-1].buffer_bytes


def test_video_widens_the_patches_only() -> None:
    config = RadioVision(video_temporal_patch_size=2)
    shape_rows = describe(config, EncoderBudgets((256,), 1), torch.float32)
    wide = describe(config, EncoderBudgets((256,), 1), torch.float32, ("image", "video"))
    assert wide[0].buffer_bytes - shape_rows[0].buffer_bytes == 4 * 1024 * config.patch_dim


def test_bytes_grow_with_the_dtype(tiny: TinyTower) -> None:
    shape = graph_shape(64, EncoderBudgets((64,), 4), prefix=5, patches_per_token=4)
    assert activation_bytes(shape, tiny.config, torch.float32) == 2 * activation_bytes(
        shape, tiny.config, torch.bfloat16
    )
    assert buffer_bytes(shape, tiny.config, torch.float32) > buffer_bytes(shape, tiny.config, torch.bfloat16)


def test_worked_bytes_of_one_arena_against_buffers_apart() -> None:
    """A tower of 1,152 features, temporal patches of two frames, rows of 4 x 4,096: 845 MiB in separate buffers, 424 in
    one."""
    config = RadioVision(hidden_size=1152, video_temporal_patch_size=2, text_hidden_size=4 * 4096)
    budgets = resolve_budgets(64, 8192)
    sizes = [
        buffer_sizes(graph_shape(budget, budgets, prefix=0, patches_per_token=4), config, ("video",))
        for budget in budgets.token_budgets
    ]
    mebibytes = {
        name: [2 * math.prod(size[name][0]) / 2**20 for size in sizes] for name in ("patches", "positions", "rows")
    }
    assert {name: round(sum(values)) for name, values in mebibytes.items()} == {
        "patches": 191,
        "positions": 143,
        "rows": 510,
    }
    assert round(sum(map(sum, mebibytes.values()))) in (844, 845)
    assert round(sum(values[-1] for values in mebibytes.values())) == 424
