"""The RADIO tower over packed images, with pixel shuffle and projector, as plain functions over fused weights.

T patches, K table rows (prefix tokens and one of zeros for padding), R tower rows, D features, H heads, N image tokens.
The maths follows transformers' `RadioModel` and `NemotronH_Omni_Reasoning_V3.get_image_features`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from encoder.config import VisionConfig
from encoder.item import IMAGE, VIDEO
from encoder.native import NativeTower, runs_compiled
from encoder.pieces import Pieces, finish
from kernels.linear import Linear
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import shuffle_norm
from kernels.varlen_attention import varlen_attention

Activation = Callable[[Tensor], Tensor]


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "silu": F.silu,
}


@dataclass(frozen=True)
class PackedBatch:
    """Device tensors of one packed launch; every size in it is known on the host."""

    patches_TP: Tensor
    positions_TD: Tensor
    source_R: Tensor
    """int64: which table row or patch each tower row is."""
    cu_seqlens: Tensor
    """int32, from 0 to R."""
    token_rows_NM: Tensor
    """int64: the tower rows under each image token."""
    max_seqlen: int


@dataclass(frozen=True)
class Norm:
    """A layer norm."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x_RD: Tensor) -> Tensor:
        return F.layer_norm(x_RD, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class _Layer:
    norm1: Norm
    qkv: Linear
    out: Linear
    norm2: Norm
    up: Linear
    """With SwiGLU the gates come first, then what they let through."""
    down: Linear


class VisionTower:
    """Weights fused and cast once; `forward` is a pure function of the batch. Raises `ValueError` for missing names."""

    def __init__(
        self, config: VisionConfig, weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> None:  # fmt: skip
        """`native`: whether it runs in compiled code, as `encoder.native` says, with memory for launches of `max_rows`
        tower rows."""
        self._compiled = runs_compiled(config, dtype, device, native)
        self.config = config
        self.dtype = dtype
        self.device = device
        given = dict(weights)
        missing = config.expected_weights().keys() - config.optional_weights() - given.keys()
        if missing:
            raise ValueError(f"{len(missing)} vision weights are missing, such as {sorted(missing)[:3]}")
        self._given = given
        self._activation = ACTIVATIONS["silu" if config.use_swiglu_ffn else config.hidden_act]
        self.projections = {IMAGE: self._linear("vision_model.embeddings.patch_projection")}
        """Per kind of item that the weights can take."""
        if (video := "vision_model.embeddings.video_patch_projection") + ".weight" in given:
            self.projections[VIDEO] = self._linear(video)
        self.position_table = self._take("vision_model.embeddings.position_embedding").clone()
        prefix_KD = self._take("vision_model.embeddings.cls_register_token")
        self.table_KD = torch.cat([prefix_KD, prefix_KD.new_zeros(1, config.hidden_size)])
        self.layers = [self._layer(f"vision_model.encoder.layer.{index}.") for index in range(config.num_layers)]
        self.final_norm = self._final_norm()
        self.projector_norm = self._take("multi_modal_projector.layer_norm.weight").float().clone()
        self.linear_1 = self._linear("multi_modal_projector.linear_1")
        self.linear_2 = self._linear("multi_modal_projector.linear_2")
        del self._given
        self.native = NativeTower(self, max_rows) if self._compiled else None

    def _take(self, name: str, scale: Tensor | None = None) -> Tensor:
        tensor = self._given[name]
        if scale is not None:
            # A layer scale belongs to the rows of the layer before it: one rounding, and no work at run time.
            tensor = scale.view(-1, *[1] * (tensor.dim() - 1)) * tensor.float()
        return tensor.to(self.device, self.dtype)

    def _linear(self, name: str, scale: Tensor | None = None) -> Linear:
        bias = self._take(name + ".bias", scale) if name + ".bias" in self._given else None
        return Linear(self._take(name + ".weight", scale), bias, compiled=self._compiled)

    def _stacked(self, names: list[str], *, biased: bool = True) -> Linear:
        weight = torch.cat([self._take(name + ".weight") for name in names])
        bias = torch.cat([self._take(name + ".bias") for name in names]) if biased else None
        return Linear(weight, bias, compiled=self._compiled)

    def _norm(self, name: str) -> Norm:
        # clone: the norm must not keep the checkpoint's memory map alive
        return Norm(
            self._take(name + ".weight").clone(), self._take(name + ".bias").clone(), self.config.layer_norm_eps
        )

    def _final_norm(self) -> Norm | None:
        if not self.config.final_layernorm:
            return None
        if "vision_final_layernorm.weight" in self._given:
            return self._norm("vision_final_layernorm")
        ones = torch.ones(self.config.hidden_size, dtype=self.dtype, device=self.device)
        return Norm(ones, torch.zeros_like(ones), self.config.layer_norm_eps)

    def _layer_scale(self, name: str) -> Tensor | None:
        stored = self._given.get(name)
        value = self.config.layerscale_value
        if stored is not None:
            return None if bool((stored == 1).all()) else stored.to(self.dtype).float()
        return None if value == 1.0 else torch.full((self.config.hidden_size,), value)

    def _layer(self, prefix: str) -> _Layer:
        scale1, scale2 = (self._layer_scale(f"{prefix}layer_scale{index}.lambda1") for index in (1, 2))
        parts = [f"{prefix}attention.{part}_proj" for part in "qkv"]
        up, down = prefix + "mlp.fc1", prefix + "mlp.fc2"
        if swiglu := self.config.use_swiglu_ffn:
            gate, up, down = (f"{prefix}mlp.{part}_proj" for part in ("gate", "up", "down"))
        return _Layer(
            norm1=self._norm(prefix + "norm1"),
            qkv=self._stacked(parts, biased=self.config.qkv_bias),
            out=self._linear(prefix + "attention.o_proj", scale1),
            norm2=self._norm(prefix + "norm2"),
            up=self._stacked([gate, up]) if swiglu else self._linear(up),
            down=self._linear(down, scale2),
        )

    def forward(self, batch: PackedBatch, *, kind: str = IMAGE) -> Tensor:
        """`[N, text_hidden]` rows in the tower's dtype, one per entry of `token_rows`; new memory.

        `kind`: whose projection the patches pass. One host read of `cu_seqlens` in the torch attention.
        """
        return finish(self.pieces(batch, kind=kind))

    def pieces(self, batch: PackedBatch, *, kind: str = IMAGE) -> Pieces[Tensor]:
        """The same, to be left after each layer."""
        projection = self.projections[kind]
        if self.native is not None:
            return (yield from self.native.pieces(batch, kind=kind))
        x_RD = patch_embed(batch.patches_TP, projection, batch.positions_TD, self.table_KD, batch.source_R)
        for layer in self.layers:
            x_RD = self._block(layer, x_RD, batch)
            yield
        norm = self.final_norm
        final = None if norm is None else (norm.weight, norm.bias, norm.eps)
        normed = shuffle_norm(x_RD, batch.token_rows_NM, self.projector_norm, self.config.projector_eps, final)
        return self.linear_2(self.linear_1.relu_squared(normed))

    def _block(self, layer: _Layer, x_RD: Tensor, batch: PackedBatch) -> Tensor:
        rows, heads, width = x_RD.shape[0], self.config.num_heads, self.config.head_dim
        q_RHD, k_RHD, v_RHD = layer.qkv(layer.norm1(x_RD)).view(rows, 3, heads, width).unbind(1)
        mixed_RHD = varlen_attention(q_RHD, k_RHD, v_RHD, batch.cu_seqlens, batch.max_seqlen, scale=width**-0.5)
        x_RD = layer.out(mixed_RHD.view(rows, heads * width)).add_(x_RD)
        inner = layer.up(layer.norm2(x_RD))
        if self.config.use_swiglu_ffn:
            gates, inner = inner.chunk(2, -1)
            return layer.down(self._activation(gates).mul_(inner)).add_(x_RD)
        return layer.down(self._activation(inner)).add_(x_RD)
