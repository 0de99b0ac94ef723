"""A vision tower of standard parts over packed sequences: patch embedding with learned positions and prefix tokens,
pre-norm transformer blocks, pixel shuffle and a projector of two linear layers. A family reads its weights into it.

T patches, K table rows (prefix tokens and one of zeros for padding), R tower rows, D features, H heads, N image tokens.
The block is that of "An Image is Worth 16x16 Words" (arXiv 2010.11929), with MLP or SwiGLU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.pieces import Pieces
from encoder.tower import PackedBatch, TowerSizes
from kernels.activations import ACTIVATIONS
from kernels.dispatch import implementation
from kernels.linear import Linear
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import shuffle_norm
from kernels.rms_norm import rms_norm
from kernels.rotary import norm_rotate
from kernels.varlen_attention import varlen_attention


@dataclass(frozen=True)
class Norm:
    """A layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x_RD: Tensor) -> Tensor:
        return F.layer_norm(x_RD, self.weight.shape, self.weight, self.bias, self.eps)

    def in_float32(self, x_RD: Tensor) -> Tensor:
        """The same in float32, whatever the dtype of the rows and weights."""
        return F.layer_norm(x_RD.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps)


@dataclass(frozen=True)
class RmsNorm:
    """An RMS norm."""

    weight: Tensor
    """float32."""
    eps: float

    def __call__(self, x_RD: Tensor) -> Tensor:
        return rms_norm(x_RD, self.weight, self.eps)


@dataclass(frozen=True)
class Block:
    """`x + out(attention(norm1(x)))`, then `x + down(act(up(norm2(x))))`; layer scales are folded into the weights."""

    norm1: Norm
    qkv: Linear
    out: Linear
    norm2: Norm
    up: Linear
    """With SwiGLU the gate's rows come first, then the rows that are gated."""
    down: Linear


class Rotations:
    """Rotates the heads of tower rows by the rotation of each row's patch, in float32; rows that are not patches are
    not rotated. Feature i of the first half of a head is paired with feature i of the second half."""

    def __init__(self, rotations_TF: Tensor, source_R: Tensor, table_KD: Tensor) -> None:
        """`rotations_TF`, `source_R`: of a `PackedBatch`; `table_KD`: the rows of its sources before the patches."""
        prefix, half = table_KD.shape[0], rotations_TF.shape[1] // 2
        fixed_KF = torch.cat((rotations_TF.new_ones(prefix, half), rotations_TF.new_zeros(prefix, half)), 1)
        self._of_sources = torch.cat((fixed_KF, rotations_TF)).unflatten(1, (2, half))
        self._source_R1 = source_R[:, None]
        self._turned: tuple[Tensor, Tensor] | None = None
        """Cosines and sines of each row, `[R, 1, half]`; None where the kernel finds them by the row's source."""
        if implementation(source_R.device.type)[0] == "reference":
            cos, sin = self._of_sources.index_select(0, source_R).unsqueeze(1).unbind(2)
            self._turned = cos, sin

    def __call__(self, x_RHP: Tensor, heads: int, norms: tuple[RmsNorm, RmsNorm] | None = None) -> Tensor:
        """`heads` heads of queries, and those of keys after them, each after its norm. A new tensor where there is a
        kernel. Otherwise x itself, overwritten: compiled attention needs queries, keys and values of one stride."""
        if self._turned is None:
            weights, eps = (None, 0.0) if norms is None else ((norms[0].weight, norms[1].weight), norms[0].eps)
            return norm_rotate(x_RHP, heads, weights, eps, self._of_sources, self._source_R1)
        width = x_RHP.shape[2]
        for norm, part in zip(norms or (), x_RHP.split((heads, x_RHP.shape[1] - heads), 1)):
            part.copy_(norm(part.reshape(-1, width)).view(part.shape))
        cos, sin = self._turned
        first, second = x_RHP.float().chunk(2, -1)
        return x_RHP.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


class ViTSizes(TowerSizes, Protocol):
    """Sizes of a `ViT`."""

    @property
    def hidden_size(self) -> int:
        """Width of a tower row: D."""

    @property
    def num_heads(self) -> int:
        """Attention heads, each `hidden_size / num_heads` wide."""

    @property
    def intermediate_size(self) -> int:
        """Inner width of the MLP."""

    @property
    def use_swiglu_ffn(self) -> bool:
        """Whether the MLP is gated (SwiGLU)."""

    @property
    def hidden_act(self) -> str:
        """Activation of an MLP that is not gated; see `kernels.activation_names`."""

    @property
    def projector_hidden_size(self) -> int:
        """Width between the projector's linear layers."""

    @property
    def projector_eps(self) -> float:
        """Epsilon of the projector's norm."""


def key_value_heads(sizes: ViTSizes) -> int:
    """Heads of keys and values, a divisor of `num_heads`: as many unless the sizes have `num_key_value_heads`."""
    return int(getattr(sizes, "num_key_value_heads", sizes.num_heads))


@dataclass(frozen=True)
class ViT:
    """Fused and cast weights. `pieces` is a pure function of the batch, in torch operations and kernels.

    Queries and keys are rotated if the batch has `rotations_TF`.
    """

    sizes: ViTSizes
    dtype: torch.dtype
    projections: Mapping[str, Linear]
    """Patch projection of each kind of item."""
    table_KD: Tensor
    """Prefix tokens, and a row of zeros for padding."""
    blocks: Sequence[Block]
    final_norm: Norm | None
    """Norm between the last block and the pixel shuffle."""
    projector_norm: Tensor | None
    """float32 weight of the RMS norm of joined rows; None: no norm."""
    linear_1: Linear
    """First linear layer of the projector; `projector_act` follows it."""
    linear_2: Linear
    projector_act: str = "relu2"
    """Activation of the projector; see `kernels.activation_names`."""
    joined_norm: Norm | None = None
    """Layer norm of joined rows; None: no such norm."""

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """Yields after each block and returns `[N, row_width]` rows in the tower's dtype, one per entry of
        `token_rows_NM`; new memory. `kind`: selects the patch projection. The torch attention reads `cu_seqlens` on the
        host once."""
        projection = self.projections[kind]
        x_RD = patch_embed(batch.patches_TP, projection, batch.positions_TD, self.table_KD, batch.source_R)
        rotated = None if batch.rotations_TF is None else Rotations(batch.rotations_TF, batch.source_R, self.table_KD)
        for block in self.blocks:
            x_RD = self._block(block, x_RD, batch, rotated)
            yield
        norm = self.final_norm
        final = None if norm is None else (norm.weight, norm.bias, norm.eps)
        normed = shuffle_norm(x_RD, batch.token_rows_NM, self.projector_norm, self.sizes.projector_eps, final)
        if self.joined_norm is not None:
            normed = self.joined_norm(normed)
        if self.projector_act == "relu2":
            return self.linear_2(self.linear_1.relu_squared(normed))
        return self.linear_2(ACTIVATIONS[self.projector_act](self.linear_1(normed)))

    def _block(self, block: Block, x_RD: Tensor, batch: PackedBatch, rotated: Rotations | None) -> Tensor:
        rows, heads, width = x_RD.shape[0], self.sizes.num_heads, self.sizes.hidden_size // self.sizes.num_heads
        qkv_RHD = block.qkv(block.norm1(x_RD)).view(rows, 3 * heads, width)
        q_RHD, k_RHD, v_RHD = qkv_RHD.split(heads, 1)
        if rotated is not None:
            q_RHD, k_RHD = rotated(qkv_RHD[:, : 2 * heads], heads).split(heads, 1)
        mixed_RHD = varlen_attention(q_RHD, k_RHD, v_RHD, batch.cu_seqlens, batch.max_seqlen, scale=width**-0.5)
        x_RD = block.out(mixed_RHD.view(rows, heads * width)).add_(x_RD)
        inner = block.up(block.norm2(x_RD))
        if self.sizes.use_swiglu_ffn:
            gates, inner = inner.chunk(2, -1)
            return block.down(F.silu(gates).mul_(inner)).add_(x_RD)
        return block.down(ACTIVATIONS[self.sizes.hidden_act](inner)).add_(x_RD)
