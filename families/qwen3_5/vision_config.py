"""The vision part of a checkpoint's configuration: tower sizes, weights, and the settings of images and clips."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from encoder.item import BLOCK_MAJOR, IMAGE, VIDEO
from encoder.media_limits import RGB
from encoder.vit_sizes import DerivedSizes, check_activation
from families.fields import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    MOST_LAYERS,
    check_processor,
    count,
    flag,
    number,
    per_channel,
    rope_parameters,
)
from families.files import CheckpointError, checkpoint_errors, first

MAX_ASPECT = 200
"""Largest ratio of the longer to the shorter side of images and frames: the released processors' limit."""
NORM_EPS = 1e-6
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


@dataclass(frozen=True)
class VisionConfig(DerivedSizes):
    """Sizes of the tower with its merger, and the settings of the image and video rules.

    Raises `ValueError` naming the fields and values of an impossible combination.
    """

    hidden_size: int
    """Width of the tower, in features."""
    num_layers: int
    num_heads: int
    intermediate_size: int
    """Inner width of the MLP."""
    text_hidden_size: int
    """Width of the rows that the decoder gets."""
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    """Side of a patch, in pixels."""
    temporal_patch_size: int = 2
    """Frames per patch of a clip."""
    merge_size: int = 2
    """Patches per image token along each side."""
    num_positions: int = 2304
    """Entries of the stored position table, a square."""
    rope_theta: float = 10000.0
    image: Resizing = RELEASED_IMAGE
    video: Resizing = RELEASED_VIDEO
    sampling: Sampling = Sampling()
    max_model_len: int | None = None
    """Context length, in tokens: larger images are an error. It does not affect how images are resized."""

    def __post_init__(self) -> None:
        positive = (
            "hidden_size", "num_layers", "num_heads", "intermediate_size", "text_hidden_size", "patch_size",
            "temporal_patch_size", "merge_size", "num_positions",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"vision {name} must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                f"vision hidden_size {self.hidden_size} divided by num_heads {self.num_heads} must be a multiple of 4"
            )
        if self.table_side**2 != self.num_positions:
            raise ValueError(f"vision num_position_embeddings {self.num_positions} is not a square")
        check_activation(self.hidden_act)
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"vision rope_theta must be above 0, got {self.rope_theta}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1, got {self.max_model_len}")

    # -- sizes of the tower -----------------------------------------------------------------------------------------

    use_swiglu_ffn = False
    num_prefix_tokens = 0
    """The tower has no prefix tokens."""
    patch_order = BLOCK_MAJOR

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotation_width(self) -> int:
        """Width of `Tower.rotations`: half of the features of a head have angles, each with a cosine and a sine."""
        return self.head_dim

    @cached_property
    def patch_widths(self) -> dict[str, int]:
        """Values in one flattened patch. Patches of images hold their only frame once."""
        return {IMAGE: self.patch_dim, VIDEO: self.patch_dim * self.temporal_patch_size}

    @property
    def projector_hidden_size(self) -> int:
        """Width between the merger's linear layers."""
        return self.hidden_size * self.patches_per_token

    projector_eps = 0.0
    """0, since merged rows pass no norm."""

    @property
    def table_side(self) -> int:
        """Rows, and columns, of the stored position table."""
        return math.isqrt(self.num_positions)

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

    # -- weights ----------------------------------------------------------------------------------------------------

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight of this tower: the published names after `visual.`."""
        hidden, inner, joined = self.hidden_size, self.intermediate_size, self.projector_hidden_size
        patch = (RGB, self.temporal_patch_size, self.patch_size, self.patch_size)
        shapes: dict[str, tuple[int, ...]] = {
            "visual.patch_embed.proj.weight": (hidden, *patch),
            "visual.patch_embed.proj.bias": (hidden,),
            "visual.pos_embed.weight": (self.num_positions, hidden),
            "visual.merger.norm.weight": (hidden,),
            "visual.merger.norm.bias": (hidden,),
        }
        linears = {"visual.merger.linear_fc1": (joined, joined), "visual.merger.linear_fc2": (self.row_width, joined)}
        for index in range(self.num_layers):
            block = f"visual.blocks.{index}."
            for norm in ("norm1", "norm2"):
                shapes[f"{block}{norm}.weight"] = shapes[f"{block}{norm}.bias"] = (hidden,)
            linears |= {
                block + "attn.qkv": (3 * hidden, hidden),
                block + "attn.proj": (hidden, hidden),
                block + "mlp.linear_fc1": (inner, hidden),
                block + "mlp.linear_fc2": (hidden, inner),
            }
        for name, (rows, columns) in linears.items():
            shapes[name + ".weight"], shapes[name + ".bias"] = (rows, columns), (rows,)
        return shapes

    def optional_weights(self) -> frozenset[str]:
        return frozenset()

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        """Images and clips, which share one projection."""
        return IMAGE, VIDEO


def vision_fields(
    vision: Mapping[str, Any], text_hidden_size: int, image: Mapping[str, Any], video: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads the fields of `VisionConfig` from `vision_config` of `config.json` and from the image and video processors'
    settings (empty: the released models' settings). Raises CheckpointError naming the field at fault."""
    if vision.get("deepstack_visual_indexes"):
        indexes = vision["deepstack_visual_indexes"]
        raise CheckpointError(f"vision_config.deepstack_visual_indexes is {indexes}; only an empty list is served")
    if (channels := first(vision, "in_channels", default=RGB)) != RGB:
        raise CheckpointError(f"vision_config.in_channels is {channels}; {RGB} is served")
    rope = rope_parameters(vision)
    if (rope_type := first(rope, "rope_type", "type", default="axial")) not in ("axial", "default"):
        raise CheckpointError(f"vision_config.rope_parameters.rope_type {rope_type!r} is not served; 'axial' is")
    with checkpoint_errors("vision_config"):
        width = count(vision, "out_hidden_size", text_hidden_size)
        if width != text_hidden_size:
            raise CheckpointError(
                f"vision_config.out_hidden_size ({width}) and the text's hidden_size ({text_hidden_size}) must agree"
            )
        fields: dict[str, Any] = {
            "hidden_size": count(vision, "hidden_size", 1152),
            "num_layers": count(vision, "depth", count(vision, "num_hidden_layers", 27), most=MOST_LAYERS),
            "num_heads": count(vision, "num_heads", count(vision, "num_attention_heads", 16)),
            "intermediate_size": count(vision, "intermediate_size", 4304),
            "text_hidden_size": text_hidden_size,
            "hidden_act": str(first(vision, "hidden_act", default="gelu_pytorch_tanh")),
            "patch_size": count(vision, "patch_size", 16),
            "temporal_patch_size": count(vision, "temporal_patch_size", 2),
            "merge_size": count(vision, "spatial_merge_size", 2),
            "num_positions": count(vision, "num_position_embeddings", 2304),
            "rope_theta": number(rope, "rope_theta", number(vision, "rope_theta", 10000.0)),
        }
        served = {name: fields[name] for name in ("patch_size", "temporal_patch_size", "merge_size")} | {
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
