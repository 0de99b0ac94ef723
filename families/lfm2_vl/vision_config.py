"""The vision part of a checkpoint's configuration: tower sizes, weights, and the settings of the image rule."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from encoder.item import IMAGE
from encoder.media_limits import RGB
from families.family import ModelFiles
from families.fields import check_processor, count, flag, number, only, per_channel, section
from families.files import CheckpointError, checkpoint_errors, first
from families.lfm2_vl.tiling import Tiling
from families.siglip import SiglipSizes, layer_shapes, linear_shapes, norm_shapes, size_fields
from families.tiles import LARGEST_TILE, MOST_TILES
from kernels.activation_names import COMPILED

JOINED_EPS = 1e-5
"""Epsilon of the projector's layer norm."""
PROJECTOR = "multi_modal_projector."
BILINEAR = 2
"""The number of this filter in processors' files."""
_FILE = "preprocessor_config.json"
_IMAGE_PROCESSORS = ("Lfm2VlImageProcessor", "Lfm2VlImageProcessorFast")


@dataclass(frozen=True)
class VisionConfig(SiglipSizes):
    """Sizes of a SigLIP2 tower with the projector, and the settings of its image rule.

    Raises `ValueError` naming the fields and values of an impossible combination.
    """

    num_patches: int = 256
    """Entries of the stored position table, a square."""
    merge_size: int = 2
    """Patches per image token along each side (`downsample_factor`)."""
    projector_hidden_size: int = 2560
    """Width between the projector's linear layers."""
    projector_act: str = "gelu"
    projector_bias: bool = True
    projector_norm: bool = True
    """Whether a layer norm precedes the projector's linear layers."""
    image: Tiling = Tiling()
    use_image_special_tokens: bool = True
    """Whether the prompt has tokens around images and before tiles."""
    max_model_len: int | None = None
    """Context length, in tokens: larger images are an error. It does not affect how images are resized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("num_patches", "merge_size", "projector_hidden_size")
        if self.table_side**2 != self.num_patches:
            raise ValueError(f"vision num_patches {self.num_patches} is not a square; {self.table_side**2} would work")
        if self.projector_act not in COMPILED:
            raise ValueError(f"projector_hidden_act {self.projector_act!r} is none of {', '.join(COMPILED)}")
        if self.image.most_tiles and self.image.tile_size % self.factor:
            raise ValueError(
                f"tile_size {self.image.tile_size} is not a multiple of {self.factor}, the patch_size "
                f"{self.patch_size} times the downsample_factor {self.merge_size}"
            )

    @property
    def projector_eps(self) -> float:
        """0: joined rows pass no RMS norm."""
        return 0.0

    @cached_property
    def patch_widths(self) -> dict[str, int]:
        """Values in one flattened patch."""
        return {IMAGE: self.patch_dim}

    @property
    def table_side(self) -> int:
        """Rows, and columns, of the stored position table."""
        return math.isqrt(self.num_patches)

    @cached_property
    def min_image_tokens(self) -> int:
        """Tokens of the smallest image."""
        return self.image.least_tokens(self.factor)

    @property
    def least_budget(self) -> int:
        """The default `lo` of the encoder's token budgets."""
        return self.min_image_tokens

    @property
    def max_image_tokens(self) -> int:
        """Tokens of an image with the most tiles, but not more than the context holds. Very flat images may have
        more."""
        tokens = self.image.most_tokens(self.factor)
        return tokens if self.max_model_len is None else max(min(tokens, self.max_model_len), self.min_image_tokens)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the tower and the projector, with its shape."""
        hidden, joined = self.hidden_size, self.hidden_size * self.patches_per_token
        shapes = linear_shapes("vision_tower.embeddings.patch_embedding", hidden, self.patch_dim)
        shapes["vision_tower.embeddings.position_embedding.weight"] = (self.num_patches, hidden)
        for index in range(self.num_layers):
            shapes |= layer_shapes(f"vision_tower.encoder.layers.{index}.", hidden, self.intermediate_size)
        shapes |= norm_shapes("vision_tower.post_layernorm", hidden)
        if self.projector_norm:
            shapes |= norm_shapes(PROJECTOR + "layer_norm", joined)
        inner, biased = self.projector_hidden_size, self.projector_bias
        shapes |= linear_shapes(PROJECTOR + "linear_1", inner, joined, biased=biased)
        return shapes | linear_shapes(PROJECTOR + "linear_2", self.text_hidden_size, inner, biased=biased)

    def optional_weights(self) -> frozenset[str]:
        """Empty: all weights are required."""
        return frozenset()

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        """Images alone."""
        return (IMAGE,)


def vision_fields(config: Mapping[str, Any], text_hidden_size: int, files: ModelFiles) -> dict[str, Any]:
    """Reads the fields of `VisionConfig` from `config.json` and the processor's files. Raises CheckpointError."""
    vision = section(config, "vision_config")
    only(config, "vision_feature_layer", -1)
    with checkpoint_errors("vision_config"):
        for name, value in (("model_type", "siglip2_vision_model"), ("num_channels", RGB)):
            if (given := first(vision, name, default=value)) != value:
                raise CheckpointError(f"vision_config.{name} is {given!r}; this model is served with {value!r}")
        fields = size_fields(vision, text_hidden_size) | {"num_patches": count(vision, "num_patches", 256)}
    return fields | {
        "merge_size": count(config, "downsample_factor", 2),
        "projector_hidden_size": count(config, "projector_hidden_size", 2560),
        "projector_act": str(first(config, "projector_hidden_act", default="gelu")),
        "projector_bias": flag(config, "projector_bias", True),
        "projector_norm": flag(config, "projector_use_layernorm", True),
        "image": _tiling(files.preprocessor, fields["patch_size"], count(config, "downsample_factor", 2)),
        "use_image_special_tokens": flag(
            files.processor, "use_image_special_tokens", True, file="processor_config.json"
        ),
    }


def _tiling(processor: Mapping[str, Any], patch_size: int, merge_size: int) -> Tiling:
    """The settings of the image processor. `do_resize`, `do_pad`, `size` and `max_num_patches` have no effect, as in
    transformers, which always resizes and whose padding no patch attends to."""
    if (kind := first(processor, "image_processor_type", default=_IMAGE_PROCESSORS[0])) not in _IMAGE_PROCESSORS:
        raise CheckpointError(
            f"{_FILE}: image_processor_type is {kind!r}; {' and '.join(_IMAGE_PROCESSORS)} are served"
        )
    served = {
        "resample": BILINEAR, "do_rescale": True, "do_normalize": True, "encoder_patch_size": patch_size,
        "downsample_factor": merge_size,
    }  # fmt: skip
    flags = ("do_rescale", "do_normalize")
    check_processor({n: v for n, v in processor.items() if v is not None or n in flags}, served, _FILE)
    if processor.get("do_center_crop"):
        raise CheckpointError(f"{_FILE}: do_center_crop is {processor['do_center_crop']!r}; false is served")
    with checkpoint_errors(_FILE):
        return Tiling(
            min_image_tokens=count(processor, "min_image_tokens", 64, file=_FILE),
            max_image_tokens=count(processor, "max_image_tokens", 256, file=_FILE),
            tile_size=count(processor, "tile_size", 512, most=LARGEST_TILE, file=_FILE),
            min_tiles=count(processor, "min_tiles", 2, file=_FILE),
            max_tiles=count(processor, "max_tiles", 10, most=MOST_TILES, file=_FILE),
            splits=flag(processor, "do_image_splitting", True, null=False, file=_FILE),
            use_thumbnail=flag(processor, "use_thumbnail", True, null=False, file=_FILE),
            max_pixels_tolerance=number(processor, "max_pixels_tolerance", 2.0, file=_FILE),
            mean=per_channel(first(processor, "image_mean", default=(0.5, 0.5, 0.5)), "image_mean"),
            std=per_channel(first(processor, "image_std", default=(0.5, 0.5, 0.5)), "image_std"),
        )
