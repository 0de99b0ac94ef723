"""The vision part of a checkpoint's configuration: sizes of the tower, its weights, and the settings of its input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from families.family import ModelFiles
from families.fields import MOST_LAYERS, count, flag, layer_kinds, number, rope_parameters, section
from families.files import CheckpointError, checkpoint_errors, first
from families.lfm3.config import CONVOLUTION, FULL
from families.qwen_media import QwenMedia, media_fields
from families.siglip import linear_shapes, norm_shapes
from kernels.activation_names import COMPILED

PROJECTOR_EPS = 1e-6
"""Epsilon of the projector's layer norm."""
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector."
WIDEST_CONVOLUTION = 15
"""Most taps along a side of a convolution. Each patch has the indices of all of them."""


@dataclass(frozen=True)
class VisionConfig(QwenMedia):
    """Sizes of the tower and the projector, and the settings of the image and video rules.

    Raises `ValueError` naming the fields and values of an impossible combination.
    """

    hidden_size: int
    """Width of the tower, in features."""
    layer_types: tuple[str, ...]
    """`conv` or `full_attention` for each layer."""
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    """Inner width of the MLPs."""
    text_hidden_size: int
    """Width of the rows that the decoder gets."""
    projector_hidden_size: int = 4096
    """Width between the projector's linear layers."""
    projector_act: str = "gelu"
    projector_bias: bool = True
    conv_kernel: int = 3
    """Taps along each side of a convolution."""
    norm_eps: float = 1e-5
    rope_theta: float = 1000000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive(
            "hidden_size", "num_heads", "num_key_value_heads", "intermediate_size", "text_hidden_size",
            "projector_hidden_size", "conv_kernel",
        )  # fmt: skip
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                f"vision hidden_size {self.hidden_size} divided by num_attention_heads {self.num_heads} must be a "
                "multiple of 4"
            )
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"vision num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.conv_kernel % 2 == 0 or self.conv_kernel > WIDEST_CONVOLUTION:
            raise ValueError(
                f"vision conv_kernel_size is {self.conv_kernel}; odd numbers up to {WIDEST_CONVOLUTION} are served"
            )
        if self.projector_act not in COMPILED:
            raise ValueError(f"projector_hidden_act {self.projector_act!r} is none of {', '.join(COMPILED)}")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"vision rope_theta must be above 0, got {self.rope_theta}")

    # -- sizes of the tower -----------------------------------------------------------------------------------------

    use_swiglu_ffn, hidden_act = True, "silu"
    position_width = 0
    """0: nothing is added to embedded patches."""
    projector_eps = 0.0
    """0: joined rows pass no RMS norm."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotation_width(self) -> int:
        """Width of `Tower.rotations`: half of the features of a head have angles, each with a cosine and a sine."""
        return self.head_dim

    @property
    def conv_side(self) -> int:
        """Taps along each side of the tower's convolutions; 0 if no layer has one."""
        return self.conv_kernel if CONVOLUTION in self.layer_types else 0

    # -- weights ----------------------------------------------------------------------------------------------------

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the tower and the projector, with its shape."""
        hidden, joined = self.hidden_size, self.hidden_size * self.patches_per_token
        shapes: dict[str, tuple[int, ...]] = {
            f"{TOWER}patch_embed.weight": (hidden, self.patch_dim * self.temporal_patch_size),
            f"{TOWER}embedding_norm.weight": (hidden,),
        }
        for index, kind in enumerate(self.layer_types):
            shapes |= self._layer_shapes(f"{TOWER}layers.{index}.", kind)
        inner, biased = self.projector_hidden_size, self.projector_bias
        shapes |= norm_shapes(PROJECTOR + "layer_norm", hidden)
        shapes |= linear_shapes(PROJECTOR + "linear_1", inner, joined, biased=biased)
        return shapes | linear_shapes(PROJECTOR + "linear_2", self.text_hidden_size, inner, biased=biased)

    def _layer_shapes(self, layer: str, kind: str) -> dict[str, tuple[int, ...]]:
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "operator_norm": (hidden,),
            "ffn_norm": (hidden,),
            "feed_forward.w1": (inner, hidden),
            "feed_forward.w2": (hidden, inner),
            "feed_forward.w3": (inner, hidden),
        }
        if kind == FULL:
            shapes |= {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (self.num_key_value_heads * head, hidden),
                "self_attn.v_proj": (self.num_key_value_heads * head, hidden),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "self_attn.out_proj": (hidden, hidden),
            }
        else:
            shapes |= {
                "conv.in_proj": (3 * hidden, hidden),
                "conv.spatial_conv": (hidden, 1, self.conv_kernel, self.conv_kernel),
                "conv.out_proj": (hidden, hidden),
            }
        return {f"{layer}{name}.weight": shape for name, shape in shapes.items()}


def vision_fields(config: Mapping[str, Any], text_hidden_size: int, files: ModelFiles) -> dict[str, Any]:
    """Reads the fields of `VisionConfig` from `config.json` and from the image and video processors' files. Raises
    CheckpointError naming the field at fault."""
    vision = section(config, "vision_config")
    with checkpoint_errors("vision_config"):
        if (given := first(vision, "model_type", default="lfm3_vl_vision")) != "lfm3_vl_vision":
            raise CheckpointError(f"vision_config.model_type is {given!r}; 'lfm3_vl_vision' is served")
        rope = rope_parameters(vision)
        if (rope_type := first(rope, "rope_type", "type", default="axial")) not in ("axial", "default"):
            raise CheckpointError(f"vision_config.rope_parameters.rope_type {rope_type!r} is not served; 'axial' is")
        fields: dict[str, Any] = {
            "hidden_size": count(vision, "hidden_size", 1024),
            "layer_types": tuple(_layer_types(vision)),
            "num_heads": count(vision, "num_attention_heads", 16),
            "num_key_value_heads": count(vision, "num_key_value_heads", 8),
            "intermediate_size": count(vision, "intermediate_size", 2560),
            "text_hidden_size": text_hidden_size,
            "conv_kernel": count(vision, "conv_kernel_size", 3),
            "norm_eps": number(vision, "norm_eps", 1e-5),
            "rope_theta": number(rope, "rope_theta", number(vision, "rope_theta", 1000000.0)),
        }
    return {
        **fields,
        **media_fields(vision, files.preprocessor, files.video_preprocessor),
        "projector_hidden_size": count(config, "projector_hidden_size", 4096),
        "projector_act": str(first(config, "projector_hidden_act", default="gelu")),
        "projector_bias": flag(config, "projector_bias", True),
    }


def _layer_types(vision: Mapping[str, Any]) -> list[str]:
    """Without `layer_types`, every second layer from the third on is attention, as in transformers."""
    layers = count(vision, "num_hidden_layers", 14, most=MOST_LAYERS)
    default = [CONVOLUTION if index < 2 or index % 2 else FULL for index in range(layers)]
    kinds = first(vision, "layer_types", default=default)
    return layer_kinds(kinds, layers, "vision_config.layer_types", {kind: kind for kind in (CONVOLUTION, FULL)})
