"""The tower's weights and its forward pass in torch operations and kernels.

The maths follows transformers' `Lfm3VlVisionModel` and `Lfm3VlMultiModalProjector`. R tower rows, D features, H heads
of queries and G of keys and values, W features of a head, K taps of a convolution, N image tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.pieces import Pieces
from encoder.tower import PackedBatch
from encoder.vit import Norm, RmsNorm, Rotations
from families.lfm3_vl.vision_config import VisionConfig
from kernels.activations import ACTIVATIONS
from kernels.linear import Linear
from kernels.pixel_shuffle import shuffle_norm
from kernels.varlen_attention import varlen_attention


@dataclass(frozen=True)
class Attention:
    """Unmasked attention within each sequence: norms of the heads' queries and keys, then rotary positions."""

    qkv: Linear
    """`[(H + 2 G) W, D]`."""
    q_norm: RmsNorm
    k_norm: RmsNorm
    out: Linear


@dataclass(frozen=True)
class Convolution:
    """`out(c * convolution(b * v))`, a depthwise convolution over the sequence's grid, with zeros around it."""

    gates: Linear
    """`[3 D, D]`: b, c and v."""
    weight_KD: Tensor
    """float32, row by row."""
    out: Linear


@dataclass(frozen=True)
class Layer:
    """`x + mixer(norm(x))`, then `x + down(silu(gate) * up)` of `mlp_norm(x)`."""

    norm: RmsNorm
    mixer: Attention | Convolution
    mlp_norm: RmsNorm
    up: Linear
    """The gate's rows come first, then the rows that are gated."""
    down: Linear


@dataclass(frozen=True)
class Parts:
    """The weights. `pieces` is a pure function of the batch."""

    sizes: VisionConfig
    dtype: torch.dtype
    projections: Mapping[str, Linear]
    """Patch projection of each kind of item."""
    table_KD: Tensor
    """A row of zeros for padding."""
    embedding_norm: RmsNorm
    layers: Sequence[Layer]
    final_norm: Norm
    """Of each row, before the rows of an image token are joined."""
    linear_1: Linear
    linear_2: Linear

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """Yields after each layer and returns `[N, row_width]` rows in the tower's dtype; new memory. The torch
        attention reads `cu_seqlens` on the host."""
        embedded_TD = self.embedding_norm(self.projections[kind](batch.patches_TP))
        x_RD = torch.cat((self.table_KD, embedded_TD)).index_select(0, batch.source_R)
        assert batch.rotations_TF is not None
        rotated = Rotations(batch.rotations_TF, batch.source_R, self.table_KD)
        taps_KR = None if batch.neighbours_RK is None else (batch.neighbours_RK.t() + 1).contiguous()
        for layer in self.layers:
            normed_RD = layer.norm(x_RD)
            if isinstance(layer.mixer, Attention):
                mixed_RD = self._attend(layer.mixer, normed_RD, batch, rotated)
            else:
                assert taps_KR is not None
                mixed_RD = _convolve(layer.mixer, normed_RD, taps_KR)
            x_RD = layer.mixer.out(mixed_RD).add_(x_RD)
            gates, inner = layer.up(layer.mlp_norm(x_RD)).chunk(2, -1)
            x_RD = layer.down(F.silu(gates).mul_(inner)).add_(x_RD)
            yield
        norm = self.final_norm
        joined = shuffle_norm(x_RD, batch.token_rows_NM, None, 0.0, (norm.weight, norm.bias, norm.eps))
        return self.linear_2(ACTIVATIONS[self.sizes.projector_act](self.linear_1(joined)))

    def _attend(self, mixer: Attention, x_RD: Tensor, batch: PackedBatch, rotated: Rotations) -> Tensor:
        sizes, rows = self.sizes, len(x_RD)
        heads, kv_heads, width = sizes.num_heads, sizes.num_key_value_heads, sizes.head_dim
        qkv_RHW = mixer.qkv(x_RD).view(rows, heads + 2 * kv_heads, width)
        turned_RHW, v_RGW = qkv_RHW.split((heads + kv_heads, kv_heads), 1)
        turned_RHW = rotated(turned_RHW, heads, (mixer.q_norm, mixer.k_norm))
        q_RHW, k_RGW = turned_RHW.split((heads, kv_heads), 1)
        mixed_RHW = varlen_attention(q_RHW, k_RGW, v_RGW, batch.cu_seqlens, batch.max_seqlen, scale=width**-0.5)
        return mixed_RHW.view(rows, heads * width)


def _convolve(mixer: Convolution, x_RD: Tensor, taps_KR: Tensor) -> Tensor:
    """`[R, D]` before `out`. `taps_KR`: 1 + the row under each tap, 0 outside the grid."""
    b_RD, c_RD, v_RD = mixer.gates(x_RD).chunk(3, -1)
    gated = F.pad(b_RD * v_RD, (0, 0, 1, 0))
    # A product and a sum at a time, whose rounding does not depend on the place in memory.
    sums_RD = torch.zeros(x_RD.shape, dtype=torch.float32, device=x_RD.device)
    for taps_R, weight_D in zip(taps_KR, mixer.weight_KD):
        sums_RD.add_(gated.index_select(0, taps_R) * weight_D)
    return sums_RD.mul_(c_RD).to(x_RD.dtype)
