"""The vision part of a checkpoint's configuration: tower sizes, weights, and the settings of the image rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from encoder.item import IMAGE, VIDEO
from encoder.media_limits import RGB
from families.family import ModelFiles
from families.fields import BICUBIC, check_processor, count, flag, per_channel, section
from families.files import CheckpointError, checkpoint_errors, first
from families.minicpmv4_6.slicing import LARGEST_SIDE, Slicing
from families.siglip import SiglipSizes, attention_shapes, layer_shapes, linear_shapes, norm_shapes, size_fields

WINDOW = 2
"""Rows per window along each side: patches for the window merger, merged rows for the last merger."""
MERGER_EPS = 1e-6
_PROCESSOR, _VIDEO_PROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json"


@dataclass(frozen=True)
class VisionConfig(SiglipSizes):
    """Sizes of a SigLIP tower with its mergers, and the settings of its image rule.

    Raises `ValueError` naming the fields and values of an impossible combination.
    """

    image_size: int = 224
    """Side, in pixels, of the square image that the position table was trained for."""
    insert_layer: int | None = 6
    """Index of the layer after which windows are merged; None: no window merger, so an image has four times the
    tokens."""
    image: Slicing = Slicing()
    video: Slicing | None = None
    """The same for the frames of videos; None for a model that takes no videos."""
    max_video_frames: int = 128
    """Most frames that are sampled from a video."""
    use_image_id: bool = True
    """Whether the prompt numbers the images."""
    number_videos: bool = True
    """Whether the prompt numbers the videos, if it numbers the images."""
    max_model_len: int | None = None
    """Context length, in tokens: larger images are an error. It does not affect how images are resized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("max_video_frames")
        if self.image_size < self.patch_size:
            raise ValueError(f"vision image_size {self.image_size} is below patch_size {self.patch_size}")
        if self.insert_layer is not None and not 0 <= self.insert_layer < self.num_layers:
            raise ValueError(
                f"insert_layer_id {self.insert_layer} must be at least 0 and below num_layers {self.num_layers}"
            )

    @property
    def projector_hidden_size(self) -> int:
        """Width of joined rows, and between the linear layers that project them."""
        return WINDOW**2 * self.hidden_size

    @property
    def projector_eps(self) -> float:
        return MERGER_EPS

    @property
    def merge_size(self) -> int:
        """Patches per image token along each side."""
        return WINDOW if self.insert_layer is None else WINDOW**2

    @cached_property
    def patch_widths(self) -> dict[str, int]:
        """Values in one flattened patch, of images and of frames alike."""
        return dict.fromkeys(self.kinds(()), self.patch_dim)

    @property
    def table_side(self) -> int:
        """Rows, and columns, of the stored position table."""
        return self.image_size // self.patch_size

    @cached_property
    def min_image_tokens(self) -> int:
        """Tokens of the smallest image."""
        return self.image.least_tokens(self.factor)

    @property
    def least_budget(self) -> int:
        """Half of the tokens of a `scale_resolution` square, so that the ladder of budgets has those of the square."""
        return max(min((self.image.scale_resolution // self.factor) ** 2 // 2, self.min_image_tokens), 1)

    @property
    def max_image_tokens(self) -> int:
        """Tokens of an image with the most slices, if rounding enlarges each side by half a token, but not more than
        the context holds. Very flat images may have more."""
        each = max(int((self.image.scale_resolution / self.factor + 0.5) ** 2), 1)
        tokens = each * (1 + self.image.most_slices)
        return tokens if self.max_model_len is None else max(min(tokens, self.max_model_len), self.min_image_tokens)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the tower, with its shape."""
        hidden, inner, joined = self.hidden_size, self.intermediate_size, WINDOW**2 * self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "vision_tower.embeddings.patch_embedding.weight": (hidden, RGB, self.patch_size, self.patch_size),
            "vision_tower.embeddings.patch_embedding.bias": (hidden,),
            "vision_tower.embeddings.position_embedding.weight": (self.table_side**2, hidden),
        }
        for index in range(self.num_layers):
            shapes |= layer_shapes(f"vision_tower.encoder.layers.{index}.", hidden, inner)
        shapes |= norm_shapes("vision_tower.post_layernorm", hidden)
        if self.insert_layer is not None:
            merger = "vision_tower.vit_merger."
            shapes |= norm_shapes(merger + "layer_norm1", hidden) | attention_shapes(merger, hidden)
            shapes |= norm_shapes(merger + "pre_norm", joined)
            shapes |= linear_shapes(merger + "linear_1", WINDOW**2 * inner, joined)
            shapes |= linear_shapes(merger + "linear_2", hidden, WINDOW**2 * inner)
        shapes |= norm_shapes("merger.mlp.0.pre_norm", joined)
        shapes |= linear_shapes("merger.mlp.0.linear_1", joined, joined)
        return shapes | linear_shapes("merger.mlp.0.linear_2", self.text_hidden_size, joined)

    def optional_weights(self) -> frozenset[str]:
        """Empty: all weights are required."""
        return frozenset()

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        """Images, and videos if there are settings for them."""
        return (IMAGE,) if self.video is None else (IMAGE, VIDEO)


def vision_fields(config: Mapping[str, Any], text_hidden_size: int, files: ModelFiles) -> dict[str, Any]:
    """Reads the fields of `VisionConfig` from `config.json` and the processors' files. Raises CheckpointError."""
    processor = files.preprocessor
    vision = section(config, "vision_config")
    with checkpoint_errors("vision_config"):
        fields = size_fields(vision, text_hidden_size) | {
            "image_size": count(vision, "image_size", 224),
            "insert_layer": _insert_layer(config),
            "image": _slicing(processor, _PROCESSOR),
            "use_image_id": _switch(processor, "use_image_id", _PROCESSOR),
        }
        if first(config, "video_token_id") is not None:
            fields |= _video_fields(files.video_preprocessor)
    _check(config, vision)
    _check_processor(config, processor, fields, _PROCESSOR)
    if "video" in fields:
        _check_processor(config, files.video_preprocessor, fields, _VIDEO_PROCESSOR)
    return fields


def _slicing(processor: Mapping[str, Any], file: str) -> Slicing:
    with checkpoint_errors(file):
        return Slicing(
            max_slice_nums=count(processor, "max_slice_nums", 9, file=file),
            scale_resolution=count(processor, "scale_resolution", 448, most=LARGEST_SIDE, file=file),
            slice_mode=_switch(processor, "slice_mode", file),
            mean=per_channel(first(processor, "image_mean", default=(0.5, 0.5, 0.5)), "image_mean"),
            std=per_channel(first(processor, "image_std", default=(0.5, 0.5, 0.5)), "image_std"),
        )


def _switch(processor: Mapping[str, Any], name: str, file: str) -> bool:
    """A flag that is on by default, and off if it is null, as in transformers."""
    return flag(processor, name, name not in processor, file=file)


def _video_fields(processor: Mapping[str, Any]) -> dict[str, Any]:
    if (stacked := first(processor, "stack_frames", default=1)) != 1:
        raise CheckpointError(f"{_VIDEO_PROCESSOR}: stack_frames is {stacked!r}; 1, one frame an image, is served")
    frames = count(processor, "max_num_frames", 128, file=_VIDEO_PROCESSOR)
    return {"video": _slicing(processor, _VIDEO_PROCESSOR), "max_video_frames": frames}


def _insert_layer(config: Mapping[str, Any]) -> int | None:
    """The index at the top level; transformers replaces the one in `vision_config` by it."""
    mode = first(config, "downsample_mode", default="16x")
    if mode not in ("16x", "4x"):
        raise CheckpointError(f"config.json: downsample_mode is {mode!r}; '16x' and '4x' are served")
    if mode == "4x":
        return None
    index = first(config, "insert_layer_id", default=6)
    if type(index) is not int:
        raise CheckpointError(f"config.json: insert_layer_id must be a whole number, not {index!r}")
    return index


def _check(config: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    """Raises CheckpointError if another setting in the files differs from what this code does."""
    square = [WINDOW, WINDOW]
    served: list[tuple[str, Mapping[str, Any], str, Any]] = [
        ("config.json", config, "merge_kernel_size", square),
        ("config.json", config, "merger_times", 1),
        ("config.json", config, "drop_vision_last_layer", False),
        ("vision_config", vision, "window_kernel_size", square),
        ("vision_config", vision, "num_channels", RGB),
    ]
    for file, settings, name, value in served:
        given = first(settings, name, default=value)
        if (list(given) if isinstance(given, tuple) else given) != value:
            raise CheckpointError(f"{file}: {name} is {given!r}; this model is served with {value!r}")


def _check_processor(
    config: Mapping[str, Any], processor: Mapping[str, Any], fields: Mapping[str, Any], file: str
) -> None:
    """Raises CheckpointError if a setting of an image or video processor differs from what this code does."""
    settings = {
        "downsample_mode": first(config, "downsample_mode", default="16x"), "patch_size": fields["patch_size"],
        "resample": BICUBIC, "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
        "do_sample_frames": True,
    }  # fmt: skip
    check_processor(processor, settings, file)
