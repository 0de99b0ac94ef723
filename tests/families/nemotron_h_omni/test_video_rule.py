"""Clips: the released rules for grids, patches and labels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from clips import moving_frames, released_pixels, released_processor
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_encoder import relative_error
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import NemotronH_Omni_Reasoning_V3Processor

from encoder.media_limits import MAX_ASPECT, ImageLimits
from encoder.preprocess import as_floats
from families.nemotron_h_omni.prompt import frame_labels, video_text
from families.nemotron_h_omni.video_rule import OmniVideoRule, most_patches, sample_indices, video_grid
from families.nemotron_h_omni.vision import RadioVision


@pytest.mark.parametrize("keep_aspect", [True, False])
@settings(deadline=None, max_examples=150)
@given(height=st.integers(1, 5000), width=st.integers(1, 5000), target=st.sampled_from([1, 16, 64, 1000, 1024, 1037]))
def test_grid_is_the_released_one(keep_aspect: bool, height: int, width: int, target: int) -> None:
    config = RadioVision(video_target_num_patches=target, video_maintain_aspect_ratio=keep_aspect)
    columns, rows = released_processor(config)._compute_target_patches(height, width)
    assert video_grid(height, width, config) == (rows, columns)


@pytest.mark.parametrize("keep_aspect", [True, False])
@settings(deadline=None, max_examples=300)
@given(
    short=st.integers(1, 160),
    aspect=st.floats(1, MAX_ASPECT),
    turned=st.booleans(),
    target=st.integers(1, 2000),
    merge=st.integers(1, 4),
    frames=st.integers(1, 5),
)
@example(short=1, aspect=MAX_ASPECT, turned=False, target=64, merge=2, frames=4)
@example(short=100, aspect=1.0, turned=False, target=1000, merge=2, frames=4)
def test_no_accepted_clip_has_more_numbers_than_the_bound(
    keep_aspect: bool, short: int, aspect: float, turned: bool, target: int, merge: int, frames: int
) -> None:
    config = RadioVision(
        video_target_num_patches=target, video_maintain_aspect_ratio=keep_aspect, merge_size=merge,
        video_temporal_patch_size=2,
    )  # fmt: skip
    height, width = (int(short * aspect), short) if turned else (short, int(short * aspect))
    ImageLimits().check_size(width, height)
    rows, columns = video_grid(height, width, config)
    bound = OmniVideoRule(config).most_numbers(frames)
    assert -(-frames // 2) * 2 * rows * columns * config.patch_dim <= bound


@settings(deadline=None, max_examples=10)
@given(target=st.integers(16, 2000), merge=st.integers(1, 4))
def test_the_bound_of_a_clip_is_reached_up_to_a_row_of_tokens(target: int, merge: int) -> None:
    config = RadioVision(video_target_num_patches=target, merge_size=merge, video_temporal_patch_size=2)
    sizes = [(short, int(short * aspect)) for short in (1, 7, 160) for aspect in (1 + i / 50 for i in range(9951))]
    most = max(rows * columns for rows, columns in (video_grid(*size, config) for size in sizes))
    assert most_patches(config) <= most + merge * (round(target**0.5) + merge)


@pytest.mark.parametrize(("height", "width"), [(40, 40), (24, 60), (61, 23), (8, 9), (16, 16)])
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_patches_are_the_released_ones(height: int, width: int, frames: int) -> None:
    config = RadioVision(patch_size=4, video_target_num_patches=24, video_temporal_patch_size=2)
    made = moving_frames(frames, height, width)
    got = OmniVideoRule(config).patchify(made, torch.float32)
    expected = released_pixels(config, made)
    expected = torch.cat([expected, expected[-1:]])[: 2 * got.num_sequences]
    rows, columns = got.grid
    assert expected.shape[-2:] == (4 * rows, 4 * columns)
    cut = expected.reshape(-1, 6, rows, 4, columns, 4).permute(0, 2, 4, 1, 3, 5).reshape(got.patches.shape)
    assert relative_error(got.patches, cut) <= 1e-6
    assert got.num_frames == frames and got.num_sequences == -(-frames // 2)
    assert got.tokens == got.num_sequences * rows * columns // 4 == OmniVideoRule(config).tokens(frames, height, width)


def test_a_generator_gives_the_same_patches() -> None:
    config = RadioVision(patch_size=4, video_target_num_patches=24, video_temporal_patch_size=3)
    made = moving_frames(5, 12, 20)
    listed = OmniVideoRule(config).patchify(made, torch.bfloat16)
    streamed = OmniVideoRule(config).patchify(iter(made), torch.bfloat16, num_frames=5)
    assert torch.equal(listed.patches, streamed.patches) and listed.patches.dtype == torch.bfloat16


def test_frames_that_need_a_resize_are_not_kept_as_bytes() -> None:
    """Bytes are only kept for frames that need no resize; either way the numbers are those of patches in floats."""
    config = RadioVision(patch_size=4, video_target_num_patches=24, video_temporal_patch_size=2)
    rows, columns = video_grid(32, 32, config)
    whole = (rows * config.patch_size, columns * config.patch_size)
    for size, kept in (((40, 56), torch.float32), (whole, torch.uint8)):
        frames = moving_frames(3, *size)
        plain = OmniVideoRule(config).patchify(frames, torch.float32)
        found = OmniVideoRule(config).patchify(frames, torch.float32, keep_bytes=True)
        assert found.grid == plain.grid and found.patches.dtype == kept
        floats = as_floats(found.patches, config.patch_size, config.image_mean, config.image_std, torch.float32)
        assert torch.equal(floats, plain.patches)


def test_bad_clips_name_the_frame_and_the_numbers() -> None:
    config = RadioVision(patch_size=4, video_target_num_patches=24, video_temporal_patch_size=2)
    made = moving_frames(3, 12, 20)
    with pytest.raises(ValueError, match="frame 2 has 12x16 pixels, the first 12x20"):
        OmniVideoRule(config).patchify([*made[:2], made[2][:, :16]], torch.float32)
    with pytest.raises(ValueError, match="frame 1: .*float32"):
        OmniVideoRule(config).patchify([made[0], made[1].float()], torch.float32)
    with pytest.raises(ValueError, match="got 0"):
        OmniVideoRule(config).patchify([], torch.float32)
    with pytest.raises(ValueError, match="got only 3 frames of a clip of 4"):
        OmniVideoRule(config).patchify(iter(made), torch.float32, num_frames=4)
    with pytest.raises(ValueError, match="frame 2 is one too many for a clip of 2"):
        OmniVideoRule(config).patchify(iter(made), torch.float32, num_frames=2)
    with pytest.raises(ValueError, match="1.0"):
        OmniVideoRule(replace(config, video_pruning_rate=1.0)).patchify(made, torch.float32)
    with pytest.raises(ValueError, match="takes no video"):
        OmniVideoRule(RadioVision()).patchify(made, torch.float32)
    with pytest.raises(ValueError, match="0x5"):
        video_grid(0, 5, config)


@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("frames", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("fps", "indices"),
    [(None, None), (24.0, None), (29.97, [0, 15, 30, 46, 61, 77, 92]), (2.0, [0, 3]), (0.0, None), (None, [0, 1])],
)
def test_labels_are_the_released_text(together: int, frames: int, fps: float | None, indices: list[int] | None) -> None:
    processor = SimpleNamespace(
        image_start_token="<img>", image_token="<image>", image_end_token="</img>", video_temporal_patch_dim=together
    )
    expected = NemotronH_Omni_Reasoning_V3Processor.replace_video_token(
        processor,  # type: ignore[arg-type]
        {"num_tokens": [3]},
        0,
        num_frames=frames,
        video_metadata=SimpleNamespace(fps=fps, frames_indices=indices),
    )
    labels = frame_labels(frames, together, fps=fps, indices=indices)
    assert video_text(labels, [3] * len(labels), start="<img>", token="<image>", end="</img>") == expected


def test_pruned_patches_keep_their_labels() -> None:
    text = video_text(["a: ", "b: "], [2, 0], start="<", token=".", end=">")
    assert text == "a: <..>\nb: <>"
    with pytest.raises(ValueError, match="2 labels for 1"):
        video_text(["a", "b"], [1], start="", token="", end="")
    with pytest.raises(ValueError, match="0 frames"):
        frame_labels(0, 2)


@given(total=st.integers(1, 500), count=st.integers(1, 500))
def test_frames_are_sampled_evenly(total: int, count: int) -> None:
    indices = sample_indices(total, count)
    assert len(indices) == min(total, count) and indices[0] == 0 and indices[-1] < total
    assert sample_indices(10, 4) == [0, 2, 5, 7] and sample_indices(5, 6) == sample_indices(5, 5) == [0, 1, 2, 3, 4]
    steps = {b - a for a, b in itertools.pairwise(indices)}
    assert not steps or (min(steps) >= 1 and max(steps) - min(steps) <= 1)
