"""The released processor's grid rule, resize and patch order."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from encoder.preprocess import as_floats
from encoder.stopwatch import Stopwatch
from families.nemotron_h_omni.image_rule import target_grid
from families.nemotron_h_omni.video_rule import OmniVideoRule
from families.nemotron_h_omni.vision import RadioVision


@pytest.mark.parametrize(
    ("height", "width", "grid"),
    [
        (224, 224, (32, 32)),
        (480, 640, (30, 40)),
        (1080, 1920, (68, 120)),
        (3024, 4032, (100, 132)),
        (100, 2000, (8, 136)),
    ],
)
def test_worked_rows_of_the_released_processor(height: int, width: int, grid: tuple[int, int]) -> None:
    assert target_grid(height, width, patch_size=16, min_patches=1024, max_patches=13312) == grid


@pytest.mark.parametrize(("height", "width", "grid"), [(40, 40, (6, 6)), (24, 200, (4, 26)), (300, 17, (38, 4))])
def test_worked_rows_of_a_small_model(height: int, width: int, grid: tuple[int, int]) -> None:
    assert target_grid(height, width, patch_size=8, min_patches=16, max_patches=256) == grid


@functools.cache
def released_rule() -> Callable[..., tuple[int, int]]:
    """transformers' own function, extracted from its module, which needs torchvision for other purposes."""
    spec = importlib.util.find_spec("transformers.models.nemotron_h_omni.image_processing_nemotron_h_omni")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    start = source.index("def get_patch_grid_size")
    end = source.index("def convert_image_to_patches")
    namespace: dict[str, Any] = {"math": math}
    exec(source[start:end], namespace)
    rule: Callable[..., tuple[int, int]] = namespace["get_patch_grid_size"]
    return rule


@settings(deadline=None)
@given(
    height=st.integers(1, 6000),
    width=st.integers(1, 6000),
    patch=st.sampled_from([8, 14, 16]),
    bounds=st.tuples(st.integers(4, 2048), st.integers(4, 16384)).map(sorted),
    merge=st.sampled_from([2, 4]),
)
@example(height=24, width=40, patch=8, bounds=[1, 16], merge=2)  # rounding one side up fills the budget exactly
def test_grid_equals_the_released_rule(height: int, width: int, patch: int, bounds: list[int], merge: int) -> None:
    try:
        expected = released_rule()(height, width, patch, merge, bounds[0], bounds[1])
    except ZeroDivisionError:
        expected = (0, 0)
    if 0 in expected:
        with pytest.raises(ValueError, match="too flat"):
            target_grid(height, width, patch_size=patch, min_patches=bounds[0], max_patches=bounds[1], merge_size=merge)
        return
    got = target_grid(height, width, patch_size=patch, min_patches=bounds[0], max_patches=bounds[1], merge_size=merge)
    assert got == expected
    assert got[0] % merge == got[1] % merge == 0


def small_config(**changes: Any) -> RadioVision:
    fields: dict[str, Any] = {
        "hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64, "patch_size": 8,
        "max_img_size": 128, "min_num_patches": 16, "max_num_patches": 256, "max_model_len": 512,
        "projector_hidden_size": 48, "text_hidden_size": 40,
    }  # fmt: skip
    return RadioVision(**{**fields, **changes})


def noise(height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("height", "width"), [(40, 40), (24, 200), (300, 17), (64, 64), (33, 57), (1, 1)])
def test_patches_equal_the_rule_written_out(height: int, width: int) -> None:
    config = small_config()
    image = noise(height, width)
    got = config.image_rule.patchify(image, torch.float32)
    size = (got.grid[0] * 8, got.grid[1] * 8)
    pixels = image.permute(2, 0, 1)[None].float()
    if size != (height, width):
        pixels = F.interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)
    pixels = pixels[0] / 255
    for channel in range(3):
        pixels[channel] = (pixels[channel] - config.image_mean[channel]) / config.image_std[channel]
    for row, column in ((0, 0), (got.grid[0] - 1, got.grid[1] - 1), (1, 0), (0, 1)):
        expected = pixels[:, row * 8 : row * 8 + 8, column * 8 : column * 8 + 8].reshape(-1)
        torch.testing.assert_close(got.patches[row * got.grid[1] + column], expected, atol=2e-6, rtol=1e-6)
    assert got.tokens == got.grid[0] * got.grid[1] // 4


def test_overshoot_of_the_resize_is_kept() -> None:
    image = torch.zeros(20, 20, 3, dtype=torch.uint8)
    image[:, 10:] = 255
    config = small_config(image_mean=(0.0, 0.0, 0.0), image_std=(1.0, 1.0, 1.0))
    patches = config.image_rule.patchify(image, torch.float32).patches
    assert patches.max() > 1.01 and patches.min() < -0.01


def test_a_stopwatch_adds_up() -> None:
    watch = Stopwatch()
    for _ in range(2):
        before = watch.seconds["resize"]
        small_config().image_rule.patchify(noise(33, 57), torch.float32, watch=watch)
        assert watch.seconds["resize"] > before and watch.seconds["patch"] > 0


def test_budget_of_a_call_is_clamped() -> None:
    assert small_config(max_model_len=512).patch_budget == 256
    assert small_config(max_model_len=24).patch_budget == 80
    assert small_config(max_model_len=5).patch_budget == 16
    assert small_config(max_num_patches=0, max_model_len=104).patch_budget == 400
    assert RadioVision().patch_budget == 13312


def test_a_lower_budget_shrinks_the_grid() -> None:
    rules = (config.image_rule for config in (small_config(), small_config(max_model_len=20)))
    full, small = (rule.patchify(noise(120, 120), torch.float32) for rule in rules)
    assert full.grid == (16, 16) and small.grid == (8, 8)


def test_misuse_names_the_numbers() -> None:
    with pytest.raises(ValueError, match="0x5"):
        target_grid(0, 5, patch_size=8, min_patches=4, max_patches=8)
    with pytest.raises(ValueError, match=r"\(5, 5\)"):
        small_config().image_rule.patchify(torch.zeros(5, 5, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="float32"):
        small_config().image_rule.patchify(torch.zeros(5, 5, 3), torch.float32)
    with pytest.raises(ValueError, match="33.*2"):
        small_config(hidden_size=33)
    with pytest.raises(ValueError, match="nope"):
        small_config(hidden_act="nope")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_become_the_same_numbers(dtype: torch.dtype) -> None:
    """An image or clip that needs no resize stays uint8 in transit, without changing the result."""
    config = RadioVision(
        patch_size=4, min_num_patches=4, max_num_patches=64, video_target_num_patches=24, video_temporal_patch_size=2
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    fitting = torch.randint(0, 256, (16, 24, 3), dtype=torch.uint8, generator=generator)
    kept, whole = (config.image_rule.patchify(fitting, dtype, keep_bytes=keep) for keep in (True, False))
    assert kept.patches.dtype == torch.uint8 and whole.patches.dtype == dtype
    assert torch.equal(as_floats(kept.patches, 4, config.image_mean, config.image_std, dtype), whole.patches)
    odd = torch.randint(0, 256, (23, 21, 3), dtype=torch.uint8, generator=generator)
    assert config.image_rule.patchify(odd, dtype, keep_bytes=True).patches.dtype == dtype
    frames = [torch.randint(0, 256, (16, 24, 3), dtype=torch.uint8, generator=generator) for _ in range(3)]
    cut, resized = (OmniVideoRule(config).patchify(frames, dtype, keep_bytes=keep) for keep in (True, False))
    assert cut.patches.dtype == torch.uint8 and cut.grid == resized.grid == (4, 6)
    assert torch.equal(as_floats(cut.patches, 4, config.image_mean, config.image_std, dtype), resized.patches)
