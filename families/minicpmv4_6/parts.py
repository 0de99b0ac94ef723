"""The tower's weights and its forward pass in torch operations and kernels.

The maths follows transformers' `MiniCPMV4_6VisionModel` and `MiniCPMV4_6Merger`. R tower rows, D features, H heads, N
image tokens, W windows of M = 4 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.pieces import Pieces
from encoder.tower import PackedBatch
from encoder.vit import Block, Norm
from families.minicpmv4_6.vision_config import WINDOW, VisionConfig
from kernels.activations import ACTIVATIONS
from kernels.linear import Linear
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import pixel_shuffle
from kernels.varlen_attention import varlen_attention


@dataclass(frozen=True)
class Merger:
    """Merges windows: takes the concatenated rows of each window through a norm, a linear layer, an activation and
    another linear layer."""

    norm: Norm
    linear_1: Linear
    act: str
    linear_2: Linear

    def __call__(self, joined_WE: Tensor) -> Tensor:
        return self.linear_2(ACTIVATIONS[self.act](self.linear_1(self.norm(joined_WE))))


@dataclass(frozen=True)
class WindowMerger:
    """Merges windows inside the tower: attention within each window, then one row per window."""

    norm: Norm
    qkv: Linear
    out: Linear
    merger: Merger


@dataclass(frozen=True)
class Parts:
    """The tower's weights. `pieces` is a pure function of the batch, in torch operations and kernels."""

    sizes: VisionConfig
    dtype: torch.dtype
    projection: Linear
    table_KD: Tensor
    """A row of zeros for padding."""
    blocks: Sequence[Block]
    window: WindowMerger | None
    """None: there is no window merger ("4x")."""
    final_norm: Norm
    merger: Merger

    def pieces(self, batch: PackedBatch, *, kind: str) -> Pieces[Tensor]:
        """Yields after each layer and returns `[N, row_width]` rows in the tower's dtype; new memory. The torch
        attention reads `cu_seqlens` on the host."""
        x_RD = patch_embed(batch.patches_TP, self.projection, batch.positions_TD, self.table_KD, batch.source_R)
        cu_seqlens, longest, token_rows_NM = batch.cu_seqlens, batch.max_seqlen, batch.token_rows_NM
        for index, block in enumerate(self.blocks):
            x_RD = self._attend(x_RD, block.norm1, block.qkv, block.out, cu_seqlens, longest)
            inner = ACTIVATIONS[self.sizes.hidden_act](block.up(block.norm2(x_RD)))
            x_RD = block.down(inner).add_(x_RD)
            if index == self.sizes.insert_layer:
                x_RD = self._merge_windows(x_RD, token_rows_NM)
                cu_seqlens, longest = merged_sequences(cu_seqlens, len(x_RD)), longest // WINDOW**2
                token_rows_NM = joined_rows(x_RD)
            yield
        return self.merger(pixel_shuffle(self.final_norm(x_RD), token_rows_NM))

    def _attend(self, x_RD: Tensor, norm: Norm, qkv: Linear, out: Linear, cu_seqlens: Tensor, longest: int) -> Tensor:
        rows, heads, width = len(x_RD), self.sizes.num_heads, self.sizes.hidden_size // self.sizes.num_heads
        q_RHD, k_RHD, v_RHD = qkv(norm(x_RD)).view(rows, 3, heads, width).unbind(1)
        mixed_RHD = varlen_attention(q_RHD, k_RHD, v_RHD, cu_seqlens, longest, scale=width**-0.5)
        return out(mixed_RHD.reshape(rows, heads * width)).add_(x_RD)

    def _merge_windows(self, x_RD: Tensor, token_rows_NM: Tensor) -> Tensor:
        """`[4 N, D]`: merges the 4 x 4 rows under each image token to 2 x 2 windows of one row each, row by row."""
        assert self.window is not None
        window = self.window
        x_RD = x_RD.index_select(0, window_order(token_rows_NM))
        x_RD = self._attend(x_RD, window.norm, window.qkv, window.out, window_bounds(x_RD), WINDOW**2)
        windows_WMD = x_RD.view(-1, WINDOW**2, x_RD.shape[1])
        return window.merger(windows_WMD.flatten(1)).add_(windows_WMD.mean(1))


def merged_sequences(cu_seqlens: Tensor, rows: int) -> Tensor:
    """`cu_seqlens` after every four rows have become one. If the last sequence is padding, its number of rows before
    need not have been a multiple of four."""
    return (cu_seqlens // WINDOW**2).clamp_(max=rows)


def joined_rows(x_RD: Tensor) -> Tensor:
    """`[N, 4]`: the rows under each image token after windows have been merged."""
    return torch.arange(len(x_RD), device=x_RD.device).view(-1, WINDOW**2)


def window_order(token_rows_NM: Tensor) -> Tensor:
    """`[16 N]`: the rows under each image token, window after window."""
    side = WINDOW
    return token_rows_NM.view(-1, side, side, side, side).permute(0, 1, 3, 2, 4).flatten()


def window_bounds(x_RD: Tensor) -> Tensor:
    """Offsets of the windows of rows in `window_order`, as attention takes them."""
    return torch.arange(0, len(x_RD) + 1, WINDOW**2, dtype=torch.int32, device=x_RD.device)
