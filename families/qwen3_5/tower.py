"""The tower with its merger: reading the published weights, positions and rotations.

The maths follows transformers' `Qwen3_5VisionModel`. D features, S the side of the stored position table, T patches.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from encoder.item import IMAGE, VIDEO, Grid
from encoder.native import NativeViT, runs_compiled
from encoder.vit import Block, ViT
from encoder.weights import TowerWeights
from families.axial import axial_rotations, frequencies, places
from families.qwen3_5.vision_config import NORM_EPS, VisionConfig
from families.qwen_videos import as_floats
from kernels.linear import AnyWeight, Linear


class QwenTower:
    """Implements `encoder.tower.Tower` and `RotaryTower`. Raises `ValueError` for missing weights."""

    def __init__(
        self, spec: VisionConfig, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> None:  # fmt: skip
        """`native`: one of `NATIVE_MODES`, whether compiled code runs the tower; `max_rows`: tower rows of the largest
        expected launch, for which its scratch memory is allocated."""
        compiled = runs_compiled(spec, dtype, device, native)
        self.sizes, self.dtype, self.device = spec, dtype, device
        stored = TowerWeights(weights, spec.expected_weights(), dtype=dtype, device=device, compiled=compiled)
        self.vit = _vit(spec, stored)
        self.kinds = tuple(self.vit.projections)
        self._table_PD = stored.take("visual.pos_embed.weight").to(torch.float32, copy=True)
        self._frequencies = frequencies(spec.head_dim, spec.rope_theta, device)
        self.native = NativeViT(self.vit, max_rows) if compiled else None
        self.pieces = self.vit.pieces if self.native is None else self.native.pieces

    def positions(self, grid: Grid) -> Tensor:
        """`[T, D]` in the tower's dtype, in merge-block order: the square table interpolated bilinearly, with its
        corners on the grid's corners."""
        rows_T, columns_T = places(grid, self.sizes.merge_size)
        side = self.sizes.table_side
        (top_T2, down_T2), (left_T2, across_T2) = _taps(rows_T, grid[0], side), _taps(columns_T, grid[1], side)
        taps_T4 = (top_T2[:, :, None] * side + left_T2[:, None]).flatten(1).to(self.device)
        weights_T4 = (down_T2[:, :, None] * across_T2[:, None]).flatten(1).to(self.device)
        # Summed in the same order as in transformers.
        found_TD = self._table_PD[taps_T4[:, 0]] * weights_T4[:, 0, None]
        for tap in range(1, taps_T4.shape[1]):
            found_TD += self._table_PD[taps_T4[:, tap]] * weights_T4[:, tap, None]
        return found_TD.to(self.dtype)

    def rotations(self, grid: Grid) -> Tensor:
        """`[T, head_dim]` float32: cosines of the row's and then of the column's angles, then the sines."""
        return axial_rotations(grid, self.sizes.merge_size, self._frequencies)

    def as_floats(self, patches: Tensor, *, kind: str = IMAGE) -> Tensor:
        """Normalises uint8 patches like the released image or video processor; result in the tower's dtype."""
        return as_floats(patches, kind, self.sizes, self.dtype)


def _taps(place_T: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """`[T, 2]` each: indices of the two table entries around each coordinate along one axis, and their float32
    weights."""
    source_T = place_T.float() * (side - 1) / max(size - 1, 1)
    first_T = source_T.floor()
    offsets = torch.arange(2)
    taps_T2 = (first_T.long()[:, None] + offsets).clamp(0, side - 1)
    distance_T2 = (source_T[:, None] - first_T[:, None] - offsets).abs()
    return taps_T2, (1 - distance_T2).clamp(min=0)


def _vit(spec: VisionConfig, stored: TowerWeights) -> ViT:
    return ViT(
        sizes=spec,
        dtype=stored.dtype,
        projections=_projections(stored),
        table_KD=torch.zeros(1, spec.hidden_size, dtype=stored.dtype, device=stored.device),
        blocks=[_block(stored, f"visual.blocks.{index}.") for index in range(spec.num_layers)],
        final_norm=stored.norm("visual.merger.norm", NORM_EPS),
        projector_norm=None,
        linear_1=stored.linear("visual.merger.linear_fc1"),
        linear_2=stored.linear("visual.merger.linear_fc2"),
        projector_act="gelu",
    )


def _projections(stored: TowerWeights) -> dict[str, Linear]:
    """The patch projections, which are stored as one 3-D convolution. The released processor repeats an image as every
    frame of its patch, so for images the weights are summed over the frames, in float32."""
    weight_DCTPP = stored.stored("visual.patch_embed.proj.weight").to(stored.device)
    folded_DCPP = weight_DCTPP.float().sum(2).to(stored.dtype)
    bias_D = stored.take("visual.patch_embed.proj.bias")
    parts = {IMAGE: folded_DCPP, VIDEO: weight_DCTPP.to(stored.dtype)}
    return {kind: stored.layer(part.flatten(1), bias_D) for kind, part in parts.items()}


def _block(stored: TowerWeights, prefix: str) -> Block:
    return Block(
        norm1=stored.norm(prefix + "norm1", NORM_EPS),
        qkv=stored.linear(prefix + "attn.qkv"),
        out=stored.linear(prefix + "attn.proj"),
        norm2=stored.norm(prefix + "norm2", NORM_EPS),
        up=stored.linear(prefix + "mlp.linear_fc1"),
        down=stored.linear(prefix + "mlp.linear_fc2"),
    )
