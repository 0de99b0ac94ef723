"""The vision part of a checkpoint's configuration: tower sizes, prefix tokens, projector, weights and preprocessing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from encoder.item import IMAGE, VIDEO
from encoder.media_limits import RGB
from encoder.vit_sizes import DerivedSizes, check_activation
from families.fields import CLIP_MEAN, CLIP_STD

MOST_PATCHES = 2**15
"""Upper bound of `min_num_patches`, above every published model's. It exists because the server times the encoder on
an image of that size before it is ready."""


@dataclass(frozen=True)
class VisionConfig(DerivedSizes):
    """Sizes of a RADIO tower with its projector, and the settings of its image and video rules.

    Raises `ValueError` naming the fields and values of an impossible combination.
    """

    hidden_size: int = 1280
    """Width of the tower, in features."""
    num_layers: int = 32
    num_heads: int = 16
    intermediate_size: int = 5120
    """Inner width of the MLP: `int(hidden_size * mlp_ratio)`, or `swiglu_size(...)` of it with `use_swiglu_ffn`."""
    hidden_act: str = "gelu"
    use_swiglu_ffn: bool = False
    qkv_bias: bool = True
    layer_norm_eps: float = 1e-6
    layerscale_value: float = 1.0
    """Layer scale where the checkpoint stores none; 1.0 is the identity."""
    patch_size: int = 16
    """Side of a patch, in pixels."""
    max_img_size: int = 2048
    """Side, in pixels, of the square image that the position table was trained for."""
    num_cls_tokens: int = 3
    num_registers: int = 7
    video_temporal_patch_size: int | None = None
    """Frames in one video patch: 1 if frames pass the projection of images; None for a tower without videos."""
    min_num_patches: int = 1024
    max_num_patches: int = 13312
    """Largest patch grid of one image, in patches; 0: only the context length limits it."""
    max_model_len: int = 16384
    """Context length, in tokens; limits the size of images."""
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    """`mean` and standard deviation per channel, of pixels scaled to 0..1."""
    merge_size: int = 2
    """Patches per image token along each side: the reciprocal of the checkpoint's downsample ratio."""
    projector_hidden_size: int = 4096
    text_hidden_size: int = 4096
    """Width of the rows that the decoder gets."""
    projector_eps: float = 1e-5
    final_layernorm: bool = False
    """Whether features pass another layer norm before the projector (for models with MTP heads)."""
    video_target_num_patches: int = 1024
    """Number of patches that the grid of a video frame aims at."""
    video_maintain_aspect_ratio: bool = True
    video_pruning_rate: float = 0.0
    """Share of a clip's rows that is dropped after the tower."""

    def __post_init__(self) -> None:
        positive = (
            "hidden_size", "num_layers", "num_heads", "intermediate_size", "patch_size", "max_img_size",
            "min_num_patches", "max_model_len", "merge_size", "projector_hidden_size", "text_hidden_size",
            "video_target_num_patches",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"vision {name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_cls_tokens", "num_registers", "max_num_patches"):
            if getattr(self, name) < 0:
                raise ValueError(f"vision {name} must not be negative, got {getattr(self, name)}")
        if self.min_num_patches > MOST_PATCHES:
            raise ValueError(f"vision min_num_patches is {self.min_num_patches}; at most {MOST_PATCHES} is served")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"vision hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.max_img_size < self.patch_size:
            raise ValueError(f"vision max_img_size {self.max_img_size} is below patch_size {self.patch_size}")
        check_activation(self.hidden_act)
        if self.video_temporal_patch_size is not None and self.video_temporal_patch_size < 1:
            raise ValueError(f"video_temporal_patch_size must be at least 1, got {self.video_temporal_patch_size}")
        if not 0 <= self.video_pruning_rate < 1:
            raise ValueError(f"video_pruning_rate must be at least 0 and below 1, got {self.video_pruning_rate}")
        if len(self.image_mean) != RGB or len(self.image_std) != RGB:
            raise ValueError(f"image_mean and image_std need {RGB} numbers each: {self.image_mean}, {self.image_std}")
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std must be positive, got {self.image_std}")

    @staticmethod
    def swiglu_size(mlp_size: int) -> int:
        """Inner width of the SwiGLU MLP that replaces a plain one of `mlp_size`: two thirds, rounded up to a multiple
        of 8."""
        return (int(mlp_size * 2 / 3) + 7) // 8 * 8

    @property
    def num_prefix_tokens(self) -> int:
        """Class and register tokens before the patches of each image."""
        return self.num_cls_tokens + self.num_registers

    @cached_property
    def patch_widths(self) -> dict[str, int]:
        """Values in one flattened patch, for each kind of item."""
        widths = {IMAGE: self.patch_dim}
        if self.video_temporal_patch_size is not None:
            widths[VIDEO] = self.patch_dim * self.video_temporal_patch_size
        return widths

    @property
    def table_side(self) -> int:
        """Rows, and columns, of the stored position table."""
        return self.max_img_size // self.patch_size

    @property
    def patch_budget(self) -> int:
        """Largest grid, in patches, that the image rule aims at: that of the context length less 4 tokens, clamped to
        `min_num_patches` and `max_num_patches`."""
        budget = max((self.max_model_len - 4) * self.patches_per_token, self.min_num_patches)
        if self.max_num_patches:
            budget = min(budget, self.max_num_patches)
        return max(budget, self.min_num_patches)

    @property
    def min_image_tokens(self) -> int:
        """Tokens of the smallest image."""
        return max(self.min_num_patches // self.patches_per_token, 1)

    @property
    def least_budget(self) -> int:
        """The default `lo` of the encoder's token budgets."""
        return self.min_image_tokens

    @property
    def max_image_tokens(self) -> int:
        """Tokens of the largest image that the image rule aims at; the default `hi` of the encoder's token budgets."""
        return max(-(-self.patch_budget // self.patches_per_token), self.min_image_tokens)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight that this tower can take, including the `optional_weights`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        embeddings = "vision_model.embeddings."
        shapes: dict[str, tuple[int, ...]] = {
            embeddings + "patch_projection.weight": (hidden, self.patch_dim),
            embeddings + "position_embedding": (1, self.table_side**2, hidden),
            embeddings + "cls_register_token": (self.num_prefix_tokens, hidden),
        }
        if (self.video_temporal_patch_size or 1) > 1:
            width = self.patch_widths[VIDEO]
            shapes[embeddings + "video_patch_projection.weight"] = (hidden, width)
        for index in range(self.num_layers):
            layer = f"vision_model.encoder.layer.{index}."
            for norm in ("norm1", "norm2"):
                shapes[layer + norm + ".weight"] = shapes[layer + norm + ".bias"] = (hidden,)
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                shapes[f"{layer}attention.{part}.weight"] = (hidden, hidden)
                if self.qkv_bias or part == "o_proj":
                    shapes[f"{layer}attention.{part}.bias"] = (hidden,)
            for part, rows, columns in self._mlp_parts(hidden, inner):
                shapes[f"{layer}mlp.{part}.weight"] = (rows, columns)
                shapes[f"{layer}mlp.{part}.bias"] = (rows,)
            shapes[layer + "layer_scale1.lambda1"] = shapes[layer + "layer_scale2.lambda1"] = (hidden,)
        if self.final_layernorm:
            shapes["vision_final_layernorm.weight"] = shapes["vision_final_layernorm.bias"] = (hidden,)
        merged = hidden * self.patches_per_token
        shapes["multi_modal_projector.layer_norm.weight"] = (merged,)
        shapes["multi_modal_projector.linear_1.weight"] = (self.projector_hidden_size, merged)
        shapes["multi_modal_projector.linear_2.weight"] = (self.text_hidden_size, self.projector_hidden_size)
        return shapes

    def _mlp_parts(self, hidden: int, inner: int) -> tuple[tuple[str, int, int], ...]:
        if self.use_swiglu_ffn:
            return (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner))
        return (("fc1", inner, hidden), ("fc2", hidden, inner))

    def optional_weights(self) -> frozenset[str]:
        """Names that a checkpoint may omit: layer scales, the final norm's weight and bias, and the video
        projection."""
        return frozenset(
            name
            for name in self.expected_weights()
            if ".layer_scale" in name or name.startswith("vision_final_layernorm.") or "video_patch_projection" in name
        )

    def kinds(self, weights: Collection[str]) -> tuple[str, ...]:
        """Images, and clips if they pass the projection of images or the weights include one for them."""
        own = "vision_model.embeddings.video_patch_projection.weight" in weights
        video = own or self.video_temporal_patch_size == 1
        return (IMAGE, VIDEO) if VIDEO in self.patch_widths and video else (IMAGE,)
