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
from encoder.pieces import finish
from encoder.preprocess import as_floats
from encoder.tower import PackedBatch
from encoder.vit import Block, Norm, ViT
from encoder.weights import plain, tower_linear
from families.nemotron_h_omni.vision_config import VisionConfig
from kernels.linear import AnyWeight, Linear

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
        reader = _Reader(spec, dict(weights), dtype, device, compiled)
        self.vit = reader.vit()
        self.kinds = tuple(self.vit.projections)
        # float32 with the features of a position contiguous: interpolation then reads four rows per patch. With one
        # plane per feature each element would be a cache miss, and a grid would take a hundred times as long.
        table_1ND = reader.take(_EMBEDDINGS + "position_embedding").to(torch.float32, copy=True)
        self._table_1DSS = table_1ND.view(1, spec.table_side, spec.table_side, -1).permute(0, 3, 1, 2)
        self.native = NativeViT(self.vit, max_rows) if compiled else None
        self.pieces = self.vit.pieces if self.native is None else self.native.pieces
        """`forward` as a generator that yields after each layer."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the compiled code's scratch memory."""
        return 0 if self.native is None else self.native.bytes

    def positions(self, grid: Grid) -> Tensor:
        """`[gh * gw, D]` in the tower's dtype, row-major; new memory."""
        return interpolate_positions(self._table_1DSS, grid, self.dtype)

    def as_floats(self, patches: Tensor) -> Tensor:
        """Normalises uint8 patches; result in the tower's dtype."""
        return as_floats(patches, self.sizes.patch_size, self.sizes.image_mean, self.sizes.image_std, self.dtype)

    def forward(self, batch: PackedBatch, *, kind: str = IMAGE) -> Tensor:
        """`[N, row_width]` rows in the tower's dtype, one per entry of `token_rows_NM`; new memory."""
        return finish(self.pieces(batch, kind=kind))


def interpolate_positions(table_1DSS: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """`[gh * gw, D]`: the square table resized bilinearly to the grid's longer side and cropped (RADIO's rule)."""
    rows, columns = grid
    side = max(grid)
    square = F.interpolate(table_1DSS, size=(side, side), mode="bilinear", align_corners=False)
    return square[0].permute(1, 2, 0)[:rows, :columns].to(dtype).reshape(rows * columns, -1)


class _Reader:
    """Reads weights by name, fuses and casts them into the parts of a `ViT`."""

    def __init__(
        self,
        spec: VisionConfig,
        given: dict[str, AnyWeight],
        dtype: torch.dtype,
        device: torch.device,
        compiled: bool,
    ) -> None:
        missing = spec.expected_weights().keys() - spec.optional_weights() - given.keys()
        if missing:
            raise ValueError(f"{len(missing)} vision weights are missing, such as {sorted(missing)[:3]}")
        # Each is used once, and gone then: a mapped file's pages count as long as a tensor has them.
        self._spec, self._given, self._dtype, self._device, self._compiled = spec, given, dtype, device, compiled

    def vit(self) -> ViT:
        prefix_KD = self.take(_EMBEDDINGS + "cls_register_token")
        layers = range(self._spec.num_layers)
        return ViT(
            sizes=self._spec,
            dtype=self._dtype,
            projections={kind: self._linear(PROJECTIONS[kind]) for kind in self._spec.kinds(self._given)},
            table_KD=torch.cat([prefix_KD, prefix_KD.new_zeros(1, self._spec.hidden_size)]),
            blocks=[self._block(f"vision_model.encoder.layer.{index}.") for index in layers],
            final_norm=self._final_norm(),
            projector_norm=self.take("multi_modal_projector.layer_norm.weight").float().clone(),
            linear_1=self._linear("multi_modal_projector.linear_1"),
            linear_2=self._linear("multi_modal_projector.linear_2"),
        )

    def take(self, name: str, scale: Tensor | None = None) -> Tensor:
        tensor = plain(self._given.pop(name))
        if scale is not None:
            # A layer scale is folded into the rows of the layer before it: one rounding, no cost at run time.
            tensor = scale.view(-1, *[1] * (tensor.dim() - 1)) * tensor.float()
        return tensor.to(self._device, self._dtype)

    def _linear(self, name: str, scale: Tensor | None = None) -> Linear:
        bias = self.take(name + ".bias", scale) if name + ".bias" in self._given else None
        weight = self._given.pop(name + ".weight") if scale is None else self.take(name + ".weight", scale)
        return tower_linear(weight, bias, dtype=self._dtype, device=self._device, compiled=self._compiled)

    def _stacked(self, names: list[str], *, biased: bool = True) -> Linear:
        weight = torch.cat([self.take(name + ".weight") for name in names])
        bias = torch.cat([self.take(name + ".bias") for name in names]) if biased else None
        return Linear(weight, bias, compiled=self._compiled)

    def _norm(self, name: str) -> Norm:
        # clone: otherwise the norm would keep the checkpoint's memory map open
        return Norm(self.take(name + ".weight").clone(), self.take(name + ".bias").clone(), self._spec.layer_norm_eps)

    def _final_norm(self) -> Norm | None:
        if not self._spec.final_layernorm:
            return None
        if "vision_final_layernorm.weight" in self._given:
            return self._norm("vision_final_layernorm")
        ones = torch.ones(self._spec.hidden_size, dtype=self._dtype, device=self._device)
        return Norm(ones, torch.zeros_like(ones), self._spec.layer_norm_eps)

    def _layer_scale(self, name: str) -> Tensor | None:
        value = self._spec.layerscale_value
        if name in self._given:
            stored = plain(self._given.pop(name))
            return None if bool((stored == 1).all()) else stored.to(self._dtype).float()
        return None if value == 1.0 else torch.full((self._spec.hidden_size,), value)

    def _block(self, prefix: str) -> Block:
        scale1, scale2 = (self._layer_scale(f"{prefix}layer_scale{index}.lambda1") for index in (1, 2))
        parts = [f"{prefix}attention.{part}_proj" for part in "qkv"]
        up, down = prefix + "mlp.fc1", prefix + "mlp.fc2"
        if swiglu := self._spec.use_swiglu_ffn:
            gate, up, down = (f"{prefix}mlp.{part}_proj" for part in ("gate", "up", "down"))
        return Block(
            norm1=self._norm(prefix + "norm1"),
            qkv=self._stacked(parts, biased=self._spec.qkv_bias),
            out=self._linear(prefix + "attention.o_proj", scale1),
            norm2=self._norm(prefix + "norm2"),
            up=self._stacked([gate, up]) if swiglu else self._linear(up),
            down=self._linear(down, scale2),
        )
