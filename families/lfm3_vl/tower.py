"""The tower with its projector: reads the published weights, and computes rotations.

D features, T patches.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from encoder.item import IMAGE, VIDEO, Grid
from encoder.media_limits import RGB
from encoder.native import runs_compiled
from encoder.weights import TowerWeights
from families.axial import axial_rotations, frequencies
from families.lfm3.config import FULL
from families.lfm3_vl.native import NativeGridTower
from families.lfm3_vl.parts import Attention, Convolution, Layer, Parts
from families.lfm3_vl.vision_config import PROJECTOR, PROJECTOR_EPS, TOWER, VisionConfig
from families.qwen_videos import as_floats
from kernels.linear import AnyWeight, Linear


class GridTower:
    """Implements `encoder.tower.Tower` and `RotaryTower`. Raises `ValueError` for missing weights."""

    def __init__(
        self, spec: VisionConfig, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> None:  # fmt: skip
        """`native`: one of `NATIVE_MODES`, whether compiled code runs the tower; `max_rows`: tower rows of the largest
        expected launch, for which its scratch memory is allocated."""
        compiled = runs_compiled(spec, dtype, device, native)
        self.sizes, self.dtype, self.device, self.kinds = spec, dtype, device, spec.kinds(())
        stored = TowerWeights(weights, spec.expected_weights(), dtype=dtype, device=device, compiled=compiled)
        self._frequencies = frequencies(spec.head_dim, spec.rope_theta, device)
        self.parts = _parts(spec, stored)
        self.native = NativeGridTower(self.parts, max_rows) if compiled else None
        self.pieces = self.parts.pieces if self.native is None else self.native.pieces

    def positions(self, grid: Grid) -> Tensor:
        """`[T, 0]`: nothing is added to embedded patches."""
        return torch.empty(grid[0] * grid[1], 0, dtype=self.dtype, device=self.device)

    def rotations(self, grid: Grid) -> Tensor:
        """`[T, head_dim]` float32: cosines of the row's and then of the column's angles, then the sines."""
        return axial_rotations(grid, self.sizes.merge_size, self._frequencies)

    def as_floats(self, patches: Tensor, *, kind: str = IMAGE) -> Tensor:
        """Normalises uint8 patches like the released image or video processor; result in the tower's dtype."""
        return as_floats(patches, kind, self.sizes, self.dtype)


def _parts(spec: VisionConfig, stored: TowerWeights) -> Parts:
    return Parts(
        sizes=spec,
        dtype=stored.dtype,
        projections=_projections(spec, stored),
        table_KD=torch.zeros(1, spec.hidden_size, dtype=stored.dtype, device=stored.device),
        embedding_norm=stored.rms_norm(TOWER + "embedding_norm", spec.norm_eps),
        layers=[
            _layer(spec, stored, f"{TOWER}layers.{index}.", kind) for index, kind in enumerate(spec.layer_types)
        ],
        final_norm=stored.norm(PROJECTOR + "layer_norm", PROJECTOR_EPS),
        linear_1=stored.linear(PROJECTOR + "linear_1"),
        linear_2=stored.linear(PROJECTOR + "linear_2"),
    )  # fmt: skip


def _projections(spec: VisionConfig, stored: TowerWeights) -> dict[str, Linear]:
    """The patch projections. The released processor repeats an image as every frame of its patch, so for images the
    weights are summed over the frames, in float32."""
    weight_DP = stored.stored(TOWER + "patch_embed.weight").to(stored.device)
    frames_DCTP = weight_DP.view(spec.hidden_size, RGB, spec.temporal_patch_size, -1)
    folded_DP = frames_DCTP.float().sum(2).flatten(1)
    parts = {IMAGE: folded_DP, VIDEO: weight_DP}
    return {kind: stored.layer(part.to(stored.dtype), None) for kind, part in parts.items()}


def _layer(spec: VisionConfig, stored: TowerWeights, prefix: str, kind: str) -> Layer:
    mixer: Attention | Convolution
    if kind == FULL:
        mixer = Attention(
            qkv=stored.joined([f"{prefix}self_attn.{part}_proj" for part in "qkv"], biased=False),
            q_norm=stored.rms_norm(prefix + "self_attn.q_norm", spec.norm_eps),
            k_norm=stored.rms_norm(prefix + "self_attn.k_norm", spec.norm_eps),
            out=stored.linear(prefix + "self_attn.out_proj"),
        )
    else:
        mixer = Convolution(
            gates=stored.linear(prefix + "conv.in_proj"),
            weight_KD=stored.take(prefix + "conv.spatial_conv.weight").float().flatten(1).t().contiguous(),
            out=stored.linear(prefix + "conv.out_proj"),
        )
    return Layer(
        norm=stored.rms_norm(prefix + "operator_norm", spec.norm_eps),
        mixer=mixer,
        mlp_norm=stored.rms_norm(prefix + "ffn_norm", spec.norm_eps),
        up=stored.joined([prefix + "feed_forward.w1", prefix + "feed_forward.w3"], biased=False),
        down=stored.linear(prefix + "feed_forward.w2"),
    )
