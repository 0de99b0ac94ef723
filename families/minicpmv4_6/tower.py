"""The SigLIP tower with its two mergers: reading the published weights, positions, and the forward pass.

The maths follows transformers' `MiniCPMV4_6VisionModel` and `MiniCPMV4_6Merger`. R tower rows, D features, H heads, N
image tokens, W windows of M = 4 rows, S the side of the stored position table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.item import IMAGE, Grid
from encoder.pieces import Pieces, finish
from encoder.tower import PackedBatch
from encoder.vit import ACTIVATIONS, Block, Norm
from encoder.weights import TowerWeights
from families.minicpmv4_6.vision_config import MERGER_EPS, WINDOW, VisionConfig
from families.qwen3_5.image_rule import normalised
from families.qwen3_5.video_rule import normalised_frames
from kernels.linear import AnyWeight, Linear
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import pixel_shuffle
from kernels.varlen_attention import varlen_attention


@dataclass(frozen=True)
class _Merger:
    """Merges windows: takes the concatenated rows of each window through a norm, a linear layer, an activation and
    another linear layer."""

    norm: Norm
    linear_1: Linear
    act: str
    linear_2: Linear

    def __call__(self, joined_WE: Tensor) -> Tensor:
        return self.linear_2(ACTIVATIONS[self.act](self.linear_1(self.norm(joined_WE))))


@dataclass(frozen=True)
class _WindowMerger:
    """Merges windows inside the tower: attention within each window, then one row per window."""

    norm: Norm
    qkv: Linear
    out: Linear
    merger: _Merger


class MergingTower:
    """Implements `encoder.tower.Tower`. Raises `ValueError` for missing weights."""

    def __init__(
        self,
        spec: VisionConfig,
        weights: Iterable[tuple[str, AnyWeight]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.sizes, self.dtype, self.device, self.kinds = spec, dtype, device, spec.kinds(())
        stored = TowerWeights(weights, spec.expected_weights(), dtype=dtype, device=device)
        embeddings, eps = "vision_tower.embeddings.", spec.layer_norm_eps
        projection_DCPP = stored.take(embeddings + "patch_embedding.weight")
        self._projection = stored.layer(projection_DCPP.flatten(1), stored.take(embeddings + "patch_embedding.bias"))
        self._table_KD = torch.zeros(1, spec.hidden_size, dtype=dtype, device=device)
        self._positions_SD = stored.take(embeddings + "position_embedding.weight").clone()
        layers = [f"vision_tower.encoder.layers.{index}." for index in range(spec.num_layers)]
        self._blocks = [_block(stored, layer, eps) for layer in layers]
        merges = spec.insert_layer is not None
        self._window = _window_merger(stored, "vision_tower.vit_merger.", eps) if merges else None
        self._final_norm = stored.norm("vision_tower.post_layernorm", eps)
        self._merger = _merger(stored, "merger.mlp.0.", "gelu", MERGER_EPS)

    @property
    def scratch_bytes(self) -> int:
        """Always 0: this tower has no compiled code."""
        return 0

    def positions(self, grid: Grid) -> Tensor:
        """`[gh * gw, D]` in the tower's dtype, row by row: the nearest entry of the square position table for each
        patch."""
        rows, columns = (_nearest(length, self.sizes.table_side) for length in grid)
        places = rows[:, None] * self.sizes.table_side + columns
        return self._positions_SD[places.flatten().to(self.device)]

    def as_floats(self, patches: Tensor, *, kind: str = IMAGE) -> Tensor:
        """Normalises uint8 patches like the released image or video processor; result in the tower's dtype."""
        if patches.dtype != torch.uint8:
            return patches.to(self.dtype)
        image, video = self.sizes.image, self.sizes.video
        if kind == IMAGE or video is None:
            return normalised(patches, image.mean, image.std).to(self.dtype)
        return normalised_frames(patches, video.mean, video.std).to(self.dtype)

    def forward(self, batch: PackedBatch, *, kind: str = IMAGE) -> Tensor:
        """`[N, row_width]` rows in the tower's dtype, one per entry of `token_rows_NM`; new memory."""
        return finish(self.pieces(batch, kind=kind))

    def pieces(self, batch: PackedBatch, *, kind: str = IMAGE) -> Pieces[Tensor]:
        """`forward` as a generator that yields after each layer. The torch attention reads `cu_seqlens` on the host."""
        x_RD = patch_embed(batch.patches_TP, self._projection, batch.positions_TD, self._table_KD, batch.source_R)
        cu_seqlens, longest, token_rows_NM = batch.cu_seqlens, batch.max_seqlen, batch.token_rows_NM
        for index, block in enumerate(self._blocks):
            x_RD = self._attend(x_RD, block.norm1, block.qkv, block.out, cu_seqlens, longest)
            inner = ACTIVATIONS[self.sizes.hidden_act](block.up(block.norm2(x_RD)))
            x_RD = block.down(inner).add_(x_RD)
            if index == self.sizes.insert_layer:
                x_RD = self._merge_windows(x_RD, token_rows_NM)
                cu_seqlens, longest = _merged_sequences(cu_seqlens, len(x_RD)), longest // WINDOW**2
                token_rows_NM = torch.arange(len(x_RD), device=x_RD.device).view(-1, WINDOW**2)
            yield
        return self._merger(pixel_shuffle(self._final_norm(x_RD), token_rows_NM))

    def _attend(self, x_RD: Tensor, norm: Norm, qkv: Linear, out: Linear, cu_seqlens: Tensor, longest: int) -> Tensor:
        rows, heads, width = len(x_RD), self.sizes.num_heads, self.sizes.hidden_size // self.sizes.num_heads
        q_RHD, k_RHD, v_RHD = qkv(norm(x_RD)).view(rows, 3, heads, width).unbind(1)
        mixed_RHD = varlen_attention(q_RHD, k_RHD, v_RHD, cu_seqlens, longest, scale=width**-0.5)
        return out(mixed_RHD.reshape(rows, heads * width)).add_(x_RD)

    def _merge_windows(self, x_RD: Tensor, token_rows_NM: Tensor) -> Tensor:
        """`[4 N, D]`: merges the 4 x 4 rows under each image token to 2 x 2 windows of one row each, row by row."""
        assert self._window is not None
        window, side = self._window, WINDOW
        order = token_rows_NM.view(-1, side, side, side, side).permute(0, 1, 3, 2, 4).flatten()
        x_RD = x_RD.index_select(0, order)
        cu_seqlens = torch.arange(0, len(x_RD) + 1, side**2, dtype=torch.int32, device=x_RD.device)
        x_RD = self._attend(x_RD, window.norm, window.qkv, window.out, cu_seqlens, side**2)
        windows_WMD = x_RD.view(-1, side**2, x_RD.shape[1])
        return window.merger(windows_WMD.flatten(1)).add_(windows_WMD.mean(1))


def _nearest(length: int, side: int) -> Tensor:
    """`[length]` int64: for each i, which of `side` table entries the fraction i / length falls in."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(length) / length, edges, right=True)


def _merged_sequences(cu_seqlens: Tensor, rows: int) -> Tensor:
    """`cu_seqlens` after every four rows have become one. If the last sequence is padding, its number of rows before
    need not have been a multiple of four."""
    return (cu_seqlens // WINDOW**2).clamp_(max=rows)


def _block(stored: TowerWeights, prefix: str, eps: float) -> Block:
    return Block(
        norm1=stored.norm(prefix + "layer_norm1", eps),
        qkv=stored.joined([f"{prefix}self_attn.{part}_proj" for part in "qkv"]),
        out=stored.linear(prefix + "self_attn.out_proj"),
        norm2=stored.norm(prefix + "layer_norm2", eps),
        up=stored.linear(prefix + "mlp.fc1"),
        down=stored.linear(prefix + "mlp.fc2"),
    )


def _window_merger(stored: TowerWeights, prefix: str, eps: float) -> _WindowMerger:
    return _WindowMerger(
        norm=stored.norm(prefix + "layer_norm1", eps),
        qkv=stored.joined([f"{prefix}self_attn.{part}_proj" for part in "qkv"]),
        out=stored.linear(prefix + "self_attn.out_proj"),
        merger=_merger(stored, prefix, "gelu_pytorch_tanh", eps),
    )


def _merger(stored: TowerWeights, prefix: str, act: str, eps: float) -> _Merger:
    norm, linear_1 = stored.norm(prefix + "pre_norm", eps), stored.linear(prefix + "linear_1")
    return _Merger(norm, linear_1, act, stored.linear(prefix + "linear_2"))
