"""Layers of SigLIP towers, which several families have: published names, shapes, and how they are read. Does not import
torch before weights are read.

D features of the tower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from encoder.vit import Block
    from encoder.weights import TowerWeights
    from kernels.linear import Linear

Shapes = dict[str, tuple[int, ...]]
"""Name and shape of each weight."""


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
