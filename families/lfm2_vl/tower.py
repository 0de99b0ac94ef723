"""The SigLIP2 tower with the projector: reads the published weights, and computes positions.

The maths follows transformers' `Siglip2VisionModel` and `Lfm2VlMultiModalProjector`. D features, S the side of the
stored position table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.item import IMAGE, Grid
from encoder.native import NativeViT, runs_compiled
from encoder.vit import ViT
from encoder.weights import TowerWeights
from families.lfm2_vl.image_rule import normalised
from families.lfm2_vl.vision_config import JOINED_EPS, PROJECTOR, VisionConfig
from families.siglip import read_layer
from kernels.linear import AnyWeight

_EMBEDDINGS = "vision_tower.embeddings."


class NaFlexTower:
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
        table_ND = stored.take(_EMBEDDINGS + "position_embedding.weight").to(torch.float32, copy=True)
        self._table_1DSS = table_ND.view(spec.table_side, spec.table_side, -1).permute(2, 0, 1)[None]
        self.vit = _vit(spec, stored)
        self.native = NativeViT(self.vit, max_rows) if compiled else None
        self.pieces = self.vit.pieces if self.native is None else self.native.pieces

    def positions(self, grid: Grid) -> Tensor:
        """`[gh * gw, D]` in the tower's dtype, row by row: the square table resized to the grid in float32, bilinearly
        with antialiasing."""
        resized = F.interpolate(self._table_1DSS, size=grid, mode="bilinear", align_corners=False, antialias=True)
        return resized[0].permute(1, 2, 0).reshape(grid[0] * grid[1], -1).to(self.dtype)

    def as_floats(self, patches: Tensor, *, kind: str = IMAGE) -> Tensor:
        """Normalises uint8 patches like the released processor; result in the tower's dtype."""
        if patches.dtype != torch.uint8:
            return patches.to(self.dtype)
        return normalised(patches, self.sizes.image.mean, self.sizes.image.std).to(self.dtype)


def _vit(spec: VisionConfig, stored: TowerWeights) -> ViT:
    layers = [f"vision_tower.encoder.layers.{index}." for index in range(spec.num_layers)]
    return ViT(
        sizes=spec,
        dtype=stored.dtype,
        projections={IMAGE: stored.linear(_EMBEDDINGS + "patch_embedding")},
        table_KD=torch.zeros(1, spec.hidden_size, dtype=stored.dtype, device=stored.device),
        blocks=[read_layer(stored, layer, spec.layer_norm_eps) for layer in layers],
        final_norm=stored.norm("vision_tower.post_layernorm", spec.layer_norm_eps),
        projector_norm=None,
        linear_1=stored.linear(PROJECTOR + "linear_1"),
        linear_2=stored.linear(PROJECTOR + "linear_2"),
        projector_act=spec.projector_act,
        joined_norm=stored.norm(PROJECTOR + "layer_norm", JOINED_EPS) if spec.projector_norm else None,
    )
