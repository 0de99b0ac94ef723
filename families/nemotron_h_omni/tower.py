"""The RADIO tower with Nemotron Omni's projector: reading the published weights, and positions.

The maths follows transformers' `RadioModel` and `NemotronH_Omni_Reasoning_V3.get_image_features`. D features, S the
side of the stored position table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.item import IMAGE, VIDEO, Grid
from encoder.native import NativeViT, runs_compiled
from encoder.preprocess import as_floats
from encoder.vit import Block, Norm, ViT
from encoder.weights import TowerWeights
from families.nemotron_h_omni.vision_config import VisionConfig
from kernels.linear import AnyWeight

_EMBEDDINGS = "vision_model.embeddings."
PROJECTIONS = {IMAGE: _EMBEDDINGS + "patch_projection", VIDEO: _EMBEDDINGS + "video_patch_projection"}
"""Names of the linear layers that project patches, per kind of item."""


class RadioTower:
    """Implements `encoder.tower.Tower`. Raises `ValueError` for missing weights."""

    def __init__(
        self, spec: VisionConfig, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> None:  # fmt: skip
        """`native`: one of `NATIVE_MODES`, whether compiled code runs the tower; `max_rows`: tower rows of the largest
        expected launch, for which its scratch memory is allocated."""
        compiled = runs_compiled(spec, dtype, device, native)
        self.sizes = spec
        self.dtype = dtype
        self.device = device
        required = spec.expected_weights().keys() - spec.optional_weights()
        stored = TowerWeights(weights, required, dtype=dtype, device=device, compiled=compiled)
        self.vit = _vit(spec, stored)
        self.kinds = tuple(self.vit.projections)
        # float32 with the features of a position contiguous, so that interpolation reads four rows per patch. With one
        # plane per feature each element would be a cache miss, and a grid would take a hundred times as long.
        table_1ND = stored.take(_EMBEDDINGS + "position_embedding").to(torch.float32, copy=True)
        self._table_1DSS = table_1ND.view(1, spec.table_side, spec.table_side, -1).permute(0, 3, 1, 2)
        self.native = NativeViT(self.vit, max_rows) if compiled else None
        self.pieces = self.vit.pieces if self.native is None else self.native.pieces

    def positions(self, grid: Grid) -> Tensor:
        """`[gh * gw, D]` in the tower's dtype, row-major; new memory."""
        return interpolate_positions(self._table_1DSS, grid, self.dtype)

    def as_floats(self, patches: Tensor, *, kind: str = IMAGE) -> Tensor:
        """Normalises uint8 patches, those of images and of clips alike; result in the tower's dtype."""
        return as_floats(patches, self.sizes.patch_size, self.sizes.image_mean, self.sizes.image_std, self.dtype)


def interpolate_positions(table_1DSS: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """`[gh * gw, D]`: the square table resized bilinearly to the grid's longer side and cropped (RADIO's rule)."""
    rows, columns = grid
    side = max(grid)
    square = F.interpolate(table_1DSS, size=(side, side), mode="bilinear", align_corners=False)
    return square[0].permute(1, 2, 0)[:rows, :columns].to(dtype).reshape(rows * columns, -1)


def _vit(spec: VisionConfig, stored: TowerWeights) -> ViT:
    prefix_KD = stored.take(_EMBEDDINGS + "cls_register_token")
    kinds, shared = spec.kinds(stored.names), spec.video_temporal_patch_size == 1
    projections = {IMAGE: stored.linear(PROJECTIONS[IMAGE])}
    if VIDEO in kinds:
        projections[VIDEO] = projections[IMAGE] if shared else stored.linear(PROJECTIONS[VIDEO])
    return ViT(
        sizes=spec,
        dtype=stored.dtype,
        projections=projections,
        table_KD=torch.cat([prefix_KD, prefix_KD.new_zeros(1, spec.hidden_size)]),
        blocks=[_block(spec, stored, f"vision_model.encoder.layer.{index}.") for index in range(spec.num_layers)],
        final_norm=_final_norm(spec, stored),
        projector_norm=stored.take("multi_modal_projector.layer_norm.weight").float().clone(),
        linear_1=stored.linear("multi_modal_projector.linear_1"),
        linear_2=stored.linear("multi_modal_projector.linear_2"),
    )


def _block(spec: VisionConfig, stored: TowerWeights, prefix: str) -> Block:
    # A layer scale is folded into the weight of the linear layer before it: one rounding, and no cost at run time.
    scale1, scale2 = (_layer_scale(spec, stored, f"{prefix}layer_scale{index}.lambda1") for index in (1, 2))
    up, down = prefix + "mlp.fc1", prefix + "mlp.fc2"
    if swiglu := spec.use_swiglu_ffn:
        gate, up, down = (f"{prefix}mlp.{part}_proj" for part in ("gate", "up", "down"))
    return Block(
        norm1=stored.norm(prefix + "norm1", spec.layer_norm_eps),
        qkv=stored.joined([f"{prefix}attention.{part}_proj" for part in "qkv"], biased=spec.qkv_bias),
        out=stored.linear(prefix + "attention.o_proj", scale1),
        norm2=stored.norm(prefix + "norm2", spec.layer_norm_eps),
        up=stored.joined([gate, up]) if swiglu else stored.linear(up),
        down=stored.linear(down, scale2),
    )


def _final_norm(spec: VisionConfig, stored: TowerWeights) -> Norm | None:
    if not spec.final_layernorm:
        return None
    if "vision_final_layernorm.weight" in stored:
        return stored.norm("vision_final_layernorm", spec.layer_norm_eps)
    ones = torch.ones(spec.hidden_size, dtype=stored.dtype, device=stored.device)
    return Norm(ones, torch.zeros_like(ones), spec.layer_norm_eps)


def _layer_scale(spec: VisionConfig, stored: TowerWeights, name: str) -> Tensor | None:
    """`[D]` float32 with the values of the tower's dtype; None if all are 1."""
    if name in stored:
        scale_D = stored.stored(name)
        return None if bool((scale_D == 1).all()) else scale_D.to(stored.dtype).float()
    return None if spec.layerscale_value == 1.0 else torch.full((spec.hidden_size,), spec.layerscale_value)
