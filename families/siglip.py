"""SigLIP towers, which several families have: their sizes, the published names and shapes of their layers, and how all
of these are read. Does not import torch before weights are read.

D features of the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from encoder.vit_sizes import DerivedSizes, check_activation
from families.fields import MOST_LAYERS, count, number
from families.files import first

if TYPE_CHECKING:
    from encoder.vit import Block
    from encoder.weights import TowerWeights
    from kernels.linear import Linear

Shapes = dict[str, tuple[int, ...]]
"""Name and shape of each weight."""


@dataclass(frozen=True)
class SiglipSizes(DerivedSizes):
    """Sizes that every SigLIP tower has. Raises `ValueError` naming the fields and values of an impossible
    combination."""

    hidden_size: int
    """Width of the tower, in features."""
    num_layers: int
    num_heads: int
    intermediate_size: int
    """Inner width of the MLP."""
    text_hidden_size: int
    """Width of the rows that the decoder gets."""
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    patch_size: int = 16
    """Side of a patch, in pixels."""

    def __post_init__(self) -> None:
        self.check_positive(
            "hidden_size", "num_layers", "num_heads", "intermediate_size", "text_hidden_size", "patch_size"
        )
        if self.hidden_size % self.num_heads:
            raise ValueError(f"vision hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        check_activation(self.hidden_act)

    @property
    def num_prefix_tokens(self) -> int:
        """0: the tower has no prefix tokens."""
        return 0

    @property
    def use_swiglu_ffn(self) -> bool:
        """False: the MLP is not gated."""
        return False


def size_fields(vision: Mapping[str, Any], text_hidden_size: int) -> dict[str, Any]:
    """Reads the fields of `SiglipSizes` from `vision_config`, with transformers' defaults. Raises CheckpointError."""
    return {
        "hidden_size": count(vision, "hidden_size", 768),
        "num_layers": count(vision, "num_hidden_layers", 12, most=MOST_LAYERS),
        "num_heads": count(vision, "num_attention_heads", 12),
        "intermediate_size": count(vision, "intermediate_size", 3072),
        "text_hidden_size": text_hidden_size,
        "hidden_act": str(first(vision, "hidden_act", default="gelu_pytorch_tanh")),
        "layer_norm_eps": number(vision, "layer_norm_eps", 1e-6),
        "patch_size": count(vision, "patch_size", 16),
    }


def linear_shapes(name: str, rows: int, columns: int, *, biased: bool = True) -> Shapes:
    """Those of a linear layer."""
    return {name + ".weight": (rows, columns)} | ({name + ".bias": (rows,)} if biased else {})


def norm_shapes(name: str, width: int) -> Shapes:
    """Those of a layer norm."""
    return {name + ".weight": (width,), name + ".bias": (width,)}


def attention_shapes(prefix: str, width: int) -> Shapes:
    """Those of the attention `prefix` + `self_attn`."""
    names = (f"{prefix}self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
    return {name: shape for each in names for name, shape in linear_shapes(each, width, width).items()}


def layer_shapes(prefix: str, width: int, inner: int) -> Shapes:
    """Those of a layer of the tower. `inner`: width of the MLP."""
    shapes = norm_shapes(prefix + "layer_norm1", width) | attention_shapes(prefix, width)
    shapes |= norm_shapes(prefix + "layer_norm2", width)
    return shapes | linear_shapes(prefix + "mlp.fc1", inner, width) | linear_shapes(prefix + "mlp.fc2", width, inner)


def read_qkv(stored: TowerWeights, prefix: str) -> Linear:
    """`[3 D, D]`: queries, keys and values of the attention `prefix` + `self_attn`."""
    return stored.joined([f"{prefix}self_attn.{part}_proj" for part in "qkv"])


def read_layer(stored: TowerWeights, prefix: str, eps: float) -> Block:
    """Reads a layer of the tower. `eps`: of its norms."""
    from encoder.vit import Block  # imported here: shapes need no torch

    return Block(
        norm1=stored.norm(prefix + "layer_norm1", eps),
        qkv=read_qkv(stored, prefix),
        out=stored.linear(prefix + "self_attn.out_proj"),
        norm2=stored.norm(prefix + "layer_norm2", eps),
        up=stored.linear(prefix + "mlp.fc1"),
        down=stored.linear(prefix + "mlp.fc2"),
    )
