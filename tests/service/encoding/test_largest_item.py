"""Bounds on what a decoder sends to an encoder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.item import IMAGE, VIDEO
from encoder.media_limits import MAX_ASPECT
from families.nemotron_h_omni.vision import RadioVision
from families.qwen3_5.vision import QwenVision
from families.qwen_media import Resizing
from service.encoding.largest_item import Largest, largest_item

RADIO = RadioVision(video_target_num_patches=256, video_temporal_patch_size=2, max_num_patches=1024)
VISIONS = {
    "omni": RADIO,
    "pruned": replace(RADIO, video_pruning_rate=0.7),
    "qwen": QwenVision(
        hidden_size=64,
        num_layers=1,
        num_heads=1,
        intermediate_size=4,
        text_hidden_size=8,
        video=Resizing(4096, 400_000),
    ),
}


@pytest.mark.parametrize("vision", VISIONS.values(), ids=VISIONS)
@settings(deadline=None, max_examples=200)
@given(
    short=st.integers(1, 400),
    aspect=st.floats(1, MAX_ASPECT),
    most=st.integers(1, 40),
    share=st.floats(0, 1),
    room=st.integers(1, 3000),
)
def test_no_video_that_a_decoder_accepts_is_larger(
    vision: RadioVision | QwenVision, short: int, aspect: float, most: int, share: float, room: int
) -> None:
    rule, frames, width = vision.video_rule, max(1, round(most * share)), int(short * aspect)
    assert rule is not None
    largest = largest_item(vision, torch.bfloat16, frames=most, room=room)
    try:
        tokens = rule.tokens(frames, short, width)
        unpruned = replace(vision, video_pruning_rate=0.0).video_rule if isinstance(vision, RadioVision) else rule
        assert unpruned is not None
        encoded = unpruned.tokens(frames, short, width)
    except ValueError:  # too flat for the model
        return
    if tokens <= room:
        assert tokens <= largest.tokens
        assert encoded * vision.patches_per_token * vision.patch_widths[VIDEO] * 2 <= largest.pixel_bytes


def test_without_videos_the_largest_image_counts() -> None:
    tokens = RADIO.max_image_tokens
    image = Largest(tokens, tokens * RADIO.patches_per_token * RADIO.patch_widths[IMAGE] * 4)
    assert largest_item(RADIO, torch.float32, frames=0, room=10**6) == image
    assert largest_item(RADIO, torch.float32, frames=0, room=5) == image._replace(tokens=5)
    assert largest_item(RADIO, torch.float32, frames=32, room=10**6) > image
