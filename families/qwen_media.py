"""Settings of the released Qwen image and video processors, which several families have: how files say them, and the
sizes that follow from them. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from encoder.item import BLOCK_MAJOR, IMAGE, VIDEO
from encoder.media_limits import RGB
from encoder.vit_sizes import DerivedSizes
from families.fields import BICUBIC, CLIP_MEAN, CLIP_STD, check_processor, count, flag, number, per_channel
from families.files import CheckpointError, checkpoint_errors, first

MAX_ASPECT = 200
"""Largest ratio of the longer to the shorter side of images and frames: the released processors' limit."""
_IMAGE_FILE, _VIDEO_FILE = "preprocessor_config.json", "video_preprocessor_config.json"


@dataclass(frozen=True)
class Resizing:
    """Resizing and scaling by the released image or video processor."""

    min_pixels: int
    """Limits on the pixels of the resized image, or of all frames of a clip together."""
    max_pixels: int
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """`mean` and standard deviation per channel, of pixels scaled to 0..1."""

    def __post_init__(self) -> None:
        if not 0 < self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"0 < min_pixels {self.min_pixels} <= max_pixels {self.max_pixels} must hold for images and for videos"
            )
        if len(self.mean) != RGB or len(self.std) != RGB or min(self.std) <= 0:
            raise ValueError(f"image_mean {self.mean} and image_std {self.std} need {RGB} numbers, image_std above 0")

    def __str__(self) -> str:
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (self.mean, self.std))
        return f"of {self.min_pixels} to {self.max_pixels} pixels, mean {mean}, deviation {std}"


RELEASED_IMAGE, RELEASED_VIDEO = Resizing(65536, 16777216), Resizing(4096, 25165824)
"""Settings in the released models' files, used if a checkpoint has no such file."""
IMAGE_DEFAULTS = Resizing(56 * 56, 28 * 28 * 1280, CLIP_MEAN, CLIP_STD)
VIDEO_DEFAULTS = Resizing(128 * 32 * 32, 768 * 32 * 32)
"""The processors' defaults for settings that a file omits."""


@dataclass(frozen=True)
class Sampling:
    """How the released video processor samples frames."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    frame_tokens: int | None = None
    """Largest number of image tokens of a frame (`cap_pixels_per_frame`); None: only the whole clip is limited."""

    def __post_init__(self) -> None:
        if not 0 < self.fps < math.inf:
            raise ValueError(f"video fps must be above 0, got {self.fps}")
        if not 0 < self.min_frames <= self.max_frames:
            raise ValueError(f"0 < min_frames {self.min_frames} <= max_frames {self.max_frames} must hold for videos")
        if self.frame_tokens is not None and self.frame_tokens < 1:
            raise ValueError(f"max_video_tokens must be at least 1, got {self.frame_tokens}")


@dataclass(frozen=True, kw_only=True)
class QwenMedia(DerivedSizes):
    """The settings of the image and video rules, with the part of `families.family.VisionSpec` that follows from them.
    Towers that take patches of both kinds are subclasses.

    Raises `ValueError` naming the fields and values of an impossible combination.
    """

    patch_size: int = 16
    """Side of a patch, in pixels."""
    temporal_patch_size: int = 2
    """Frames per patch of a clip."""
    merge_size: int = 2
    """Patches per image token along each side."""
    image: Resizing = RELEASED_IMAGE
    video: Resizing = RELEASED_VIDEO
    sampling: Sampling = Sampling()
    max_model_len: int | None = None
    """Context length, in tokens: larger images are an error. It does not affect how images are resized."""

    def __post_init__(self) -> None:
        self.check_positive("patch_size", "temporal_patch_size", "merge_size")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {self.max_model_len}")

    num_prefix_tokens = 0
    """The towers have no prefix tokens."""
    patch_order = BLOCK_MAJOR

    @cached_property
    def patch_widths(self) -> dict[str, int]:
        """Values in one flattened patch. Patches of images hold their only frame once."""
        return {IMAGE: self.patch_dim, VIDEO: self.patch_dim * self.temporal_patch_size}

    @property
    def min_image_tokens(self) -> int:
        """Tokens of the smallest image."""
        return min(max(self.image.min_pixels // self.factor**2, 1), self.max_image_tokens)

    @property
    def least_budget(self) -> int:
        """The default `lo` of the encoder's token budgets."""
        return self.min_image_tokens

    @property
    def max_image_tokens(self) -> int:
        """Tokens of the largest image that is accepted; the default `hi` of the encoder's token budgets."""
        # A very flat image keeps a side of one token, and its other side is at most MAX_ASPECT tokens long. A small
        # image is enlarged to whole tokens, to at most `grown` of them.
        grown = (math.isqrt(self.image.min_pixels) // self.factor + 8) ** 2
        tokens = max(self.image.max_pixels // self.factor**2, MAX_ASPECT, grown)
        return tokens if self.max_model_len is None else max(min(tokens, self.max_model_len), 1)

    def optional_weights(self) -> frozenset[str]:
        """Empty: all weights are required."""
        return frozenset()

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        """Images and clips, which share one projection."""
        return IMAGE, VIDEO

    def limited(self, *, max_model_len: int, video_pruning_rate: float | None = None) -> Self:
        if video_pruning_rate:
            raise ValueError(
                f"video_pruning_rate {video_pruning_rate:g}: this model's videos cannot be pruned; 0 would work"
            )
        return replace(self, max_model_len=max_model_len)

    def describe_preprocessing(self) -> str:
        return (
            f"patch {self.patch_size}, {self.temporal_patch_size} frames a patch, merge {self.merge_size}, "
            f"images {self.image}, videos {self.video}"
        )


def media_fields(vision: Mapping[str, Any], image: Mapping[str, Any], video: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the fields of `QwenMedia` from `vision_config` of `config.json` and from the image and video processors'
    settings (empty: the released models' settings). Raises CheckpointError naming the field at fault."""
    if (channels := first(vision, "in_channels", default=RGB)) != RGB:
        raise CheckpointError(f"vision_config.in_channels is {channels}; {RGB} is served")
    with checkpoint_errors("vision_config"):
        fields: dict[str, Any] = {
            "patch_size": count(vision, "patch_size", 16),
            "temporal_patch_size": count(vision, "temporal_patch_size", 2),
            "merge_size": count(vision, "spatial_merge_size", 2),
        }
    served = fields | {
        "resample": BICUBIC, "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "do_sample_frames": True,
    }  # fmt: skip
    for settings, name in ((image, _IMAGE_FILE), (video, _VIDEO_FILE)):
        check_processor(settings, served, name)
    with checkpoint_errors(_IMAGE_FILE):
        fields["image"] = _resizing(image, IMAGE_DEFAULTS if image else RELEASED_IMAGE, _IMAGE_FILE)
    # The released video processor reads its limits from `size` alone.
    inner = {**video, "min_pixels": None, "max_pixels": None}
    with checkpoint_errors(_VIDEO_FILE):
        fields["video"] = _resizing(inner, VIDEO_DEFAULTS if video else RELEASED_VIDEO, _VIDEO_FILE)
        fields["sampling"] = _sampling(video)
    return fields


def _resizing(settings: Mapping[str, Any], released: Resizing, file: str) -> Resizing:
    size = first(settings, "size", default={})
    names = ("shortest_edge", "longest_edge", "min_pixels", "max_pixels")
    if not isinstance(size, Mapping) or (size and not any(name in size for name in names)):
        raise ValueError(f"size {size!r} holds no shortest_edge and longest_edge")

    def pixels(name: str, edge: str, default: int) -> int:
        """`name` in the file, else in its `size`, where it may be called `edge`."""
        inner = count(size, edge, count(size, name, default, file=file), file=file)
        return count(settings, name, inner, file=file)

    low = pixels("min_pixels", "shortest_edge", released.min_pixels)
    high = pixels("max_pixels", "longest_edge", released.max_pixels)
    mean, std = (first(settings, f"image_{name}", default=getattr(released, name)) for name in ("mean", "std"))
    return Resizing(low, high, per_channel(mean, "image_mean"), per_channel(std, "image_std"))


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    if settings.get("num_frames") is not None:
        raise ValueError(f"num_frames is {settings['num_frames']}; it must be unset: clips are sampled by fps")
    if settings.get("fps", 2.0) is None:
        raise ValueError("fps is null, with which all frames of a clip are taken; a number such as 2.0 is served")
    capped = flag(settings, "cap_pixels_per_frame", file=_VIDEO_FILE)
    return Sampling(
        fps=number(settings, "fps", 2.0, file=_VIDEO_FILE),
        min_frames=count(settings, "min_frames", 4, file=_VIDEO_FILE),
        max_frames=count(settings, "max_frames", 768, file=_VIDEO_FILE),
        frame_tokens=count(settings, "max_video_tokens", 768, file=_VIDEO_FILE) if capped else None,
    )
