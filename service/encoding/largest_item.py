"""Sizes of the largest images and videos, which decide whether an encoder in another server can take what a decoder
sends: pixels within its window, and rows within its handoff."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from encoder.item import IMAGE, VIDEO
from families import VisionSpec
from service.common.config import ConfigError, ServerOptions
from service.encoding.items import LARGEST_MESSAGE


class Largest(NamedTuple):
    """Bounds on one image or video."""

    tokens: int
    """Rows."""
    pixel_bytes: int
    """Bytes of patches."""


def largest_item(vision: VisionSpec, dtype: torch.dtype, *, frames: int, room: int) -> Largest:
    """Bounds on an image, or a video of at most `frames` frames; 0 if there are no videos. `room`: the most rows that a
    request may have."""
    tokens = vision.max_image_tokens
    numbers = tokens * vision.patches_per_token * vision.patch_widths[IMAGE]
    if frames and (rule := vision.video_rule) is not None:
        width = vision.patches_per_token * vision.patch_widths[VIDEO]
        # Rows are dropped after encoding, so a video has the patches of more rows than it leaves.
        encoded = math.ceil((room + 1) / (1 - rule.pruning_rate)) if rule.pruning_rate else room
        numbers_of_video = min(rule.most_numbers(frames), encoded * width)
        tokens, numbers = max(tokens, numbers_of_video // width), max(numbers, numbers_of_video)
    return Largest(min(tokens, room), numbers * dtype.itemsize)


def check_messages(options: ServerOptions) -> None:
    """Raises ConfigError if an encoder could not exchange pixels and rows with its decoders."""
    if options.max_message_bytes < LARGEST_MESSAGE:
        raise ConfigError(
            f"max_message_bytes: {options.max_message_bytes} is too small for the messages between an encoder and its "
            f"decoders; at least {LARGEST_MESSAGE} would work"
        )


def check_window(options: ServerOptions, largest: Largest) -> None:
    """Raises ConfigError if one decoder's share of `max_inflight_bytes` is smaller than the pixels of the largest image
    or video, since no decoder with these options could attach then."""
    window, pixels = options.max_inflight_bytes // options.max_decoders, largest.pixel_bytes
    if window < pixels:
        fewer = options.max_inflight_bytes // pixels
        raise ConfigError(
            f"max_inflight_bytes: {options.max_inflight_bytes} is {window} bytes of pixels for each of "
            f"{options.max_decoders} decoders (max_decoders), but the largest image or video may have {pixels}; at "
            f"least {pixels * options.max_decoders} would work" + (f", or at most {fewer} decoders" if fewer else "")
        )
