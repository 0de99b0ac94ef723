"""The vision part of a checkpoint's configuration: tower sizes, weights, and the settings of images and clips."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoder.media_limits import RGB
from encoder.vit_sizes import check_activation
from families.fields import MOST_LAYERS, count, number, rope_parameters
from families.files import CheckpointError, checkpoint_errors, first
from families.qwen_media import QwenMedia, media_fields

NORM_EPS = 1e-6


@dataclass(frozen=True)
class VisionConfig(QwenMedia):
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
    num_positions: int = 2304
    """Entries of the stored position table, a square."""
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive(
            "hidden_size", "num_layers", "num_heads", "intermediate_size", "text_hidden_size", "num_positions"
        )
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ValueError(
                f"vision hidden_size {self.hidden_size} divided by num_heads {self.num_heads} must be a multiple of 4"
            )
        if self.table_side**2 != self.num_positions:
            raise ValueError(f"vision num_position_embeddings {self.num_positions} is not a square")
        check_activation(self.hidden_act)
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"vision rope_theta must be above 0, got {self.rope_theta}")

    # -- sizes of the tower -----------------------------------------------------------------------------------------

    use_swiglu_ffn = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def rotation_width(self) -> int:
        """Width of `Tower.rotations`: half of the features of a head have angles, each with a cosine and a sine."""
        return self.head_dim

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


def vision_fields(
    vision: Mapping[str, Any], text_hidden_size: int, image: Mapping[str, Any], video: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads the fields of `VisionConfig` from `vision_config` of `config.json` and from the image and video processors'
    settings (empty: the released models' settings). Raises CheckpointError naming the field at fault."""
    if vision.get("deepstack_visual_indexes"):
        indexes = vision["deepstack_visual_indexes"]
        raise CheckpointError(f"vision_config.deepstack_visual_indexes is {indexes}; only an empty list is served")
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
            "num_positions": count(vision, "num_position_embeddings", 2304),
            "rope_theta": number(rope, "rope_theta", number(vision, "rope_theta", 10000.0)),
        }
    return fields | media_fields(vision, image, video)
