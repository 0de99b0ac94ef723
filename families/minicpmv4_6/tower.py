"""The SigLIP tower with its two mergers: reads the published weights, and computes positions.

D features, N image tokens, S the side of the stored position table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from encoder.item import IMAGE, Grid
from encoder.native import runs_compiled
from encoder.weights import TowerWeights
from families.minicpmv4_6.native import NativeMergingTower
from families.minicpmv4_6.parts import Merger, Parts, WindowMerger
from families.minicpmv4_6.vision_config import MERGER_EPS, VisionConfig
from families.qwen_images import normalised
from families.qwen_videos import normalised_frames
from families.siglip import read_layer, read_qkv
from kernels.linear import AnyWeight

_EMBEDDINGS = "vision_tower.embeddings."


class MergingTower:
    """Implements `encoder.tower.Tower`. Raises `ValueError` for missing weights."""

    def __init__(
        self, spec: VisionConfig, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> None:  # fmt: skip
        """`native`: one of `NATIVE_MODES`, whether compiled code runs the tower; `max_rows`: tower rows of the largest
        expected launch, for which its scratch memory is allocated."""
        compiled = runs_compiled(spec, dtype, device, native)
        self.sizes, self.dtype, self.device, self.kinds = spec, dtype, device, spec.kinds(())
        stored = TowerWeights(weights, spec.expected_weights(), dtype=dtype, device=device, compiled=compiled)
        self._positions_SD = stored.take(_EMBEDDINGS + "position_embedding.weight").clone()
        self.parts = _parts(spec, stored)
        self.native = NativeMergingTower(self.parts, max_rows) if compiled else None
        self.pieces = self.parts.pieces if self.native is None else self.native.pieces

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


def _nearest(length: int, side: int) -> Tensor:
    """`[length]` int64: for each i, which of `side` table entries the fraction i / length falls in."""
    edges = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(length) / length, edges, right=True)


def _parts(spec: VisionConfig, stored: TowerWeights) -> Parts:
    eps = spec.layer_norm_eps
    projection_DCPP = stored.take(_EMBEDDINGS + "patch_embedding.weight")
    layers = [f"vision_tower.encoder.layers.{index}." for index in range(spec.num_layers)]
    merges = spec.insert_layer is not None
    return Parts(
        spec,
        stored.dtype,
        stored.layer(projection_DCPP.flatten(1), stored.take(_EMBEDDINGS + "patch_embedding.bias")),
        torch.zeros(1, spec.hidden_size, dtype=stored.dtype, device=stored.device),
        [read_layer(stored, layer, eps) for layer in layers],
        _window_merger(stored, "vision_tower.vit_merger.", eps) if merges else None,
        stored.norm("vision_tower.post_layernorm", eps),
        _merger(stored, "merger.mlp.0.", "gelu", MERGER_EPS),
    )


def _window_merger(stored: TowerWeights, prefix: str, eps: float) -> WindowMerger:
    return WindowMerger(
        norm=stored.norm(prefix + "layer_norm1", eps),
        qkv=read_qkv(stored, prefix),
        out=stored.linear(prefix + "self_attn.out_proj"),
        merger=_merger(stored, prefix, "gelu_pytorch_tanh", eps),
    )


def _merger(stored: TowerWeights, prefix: str, act: str, eps: float) -> Merger:
    norm, linear_1 = stored.norm(prefix + "pre_norm", eps), stored.linear(prefix + "linear_1")
    return Merger(norm, linear_1, act, stored.linear(prefix + "linear_2"))
