"""Random models for the GPU benchmarks: real sizes, or tiny ones for trying the programs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.recurrent_descriptions import GatedDelta
from decoder.layers.spec import Layer, MixerSpec
from encoder.item import EncoderItem
from families.nemotron_h.config import NemotronHConfig
from families.nemotron_h_omni.vision import RadioVision
from kernels.rope import Rope

_NEMOTRON_9B = NemotronHConfig(
    pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    vocab_size=131072, hidden_size=4480, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
    intermediate_size=15680, mamba_num_heads=128, mamba_head_dim=80, ssm_state_size=128, n_groups=8,
)  # fmt: skip
"""The 8B-class decoder: the shape of Nemotron Nano V2 9B."""
_NANO_3_30B = NemotronHConfig(
    pattern="ME*", vocab_size=131072, hidden_size=2688, num_attention_heads=32, num_key_value_heads=2, head_dim=128,
    mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8, n_routed_experts=128,
    num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
    routed_scaling_factor=2.5,
)  # fmt: skip
"""One layer of each kind of Nemotron 3 Nano Omni's decoder."""
_SHARES: dict[str, Any] = {"mlp_hidden_act": "silu", "gated": True}
_INTERLEAVED = tuple(i % 3 for i in range(32))
_QWEN_35B: dict[str, MixerSpec] = {
    "delta": GatedDelta(2048, 16, 32),
    "experts": Experts(2048, 256, 8, 512, 512, routing="softmax", shared_gate=True, **_SHARES),
    "attention": Attention(2048, 16, 2, 256, rope=Rope(64, 1e7, _INTERLEAVED), gate=True, qk_norm=1e-6),
    "mlp": Mlp(2048, 6144, **_SHARES),
}
"""One layer of each kind of Qwen3.5 35B-A3B, and an MLP as in dense models of the family."""
_TINY_QWEN: dict[str, MixerSpec] = {
    "delta": GatedDelta(32, 2, 4, 8, 8, chunk_size=8),
    "experts": Experts(32, 6, 2, 24, 40, routing="softmax", shared_gate=True, **_SHARES),
    "attention": Attention(32, 4, 2, 12, rope=Rope(6, 100.0, (0, 1, 2)), gate=True, qk_norm=1e-6),
    "mlp": Mlp(32, 48, **_SHARES),
}
RADIO_H = RadioVision(text_hidden_size=2688, projector_hidden_size=20480)
_TINY_9B = replace(
    _NEMOTRON_9B, pattern="M-*M-", vocab_size=97, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=48, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=16, n_groups=2, chunk_size=8,
)  # fmt: skip
_TINY_30B = replace(
    _TINY_9B, pattern="ME*", n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=40, routed_scaling_factor=2.5,
)  # fmt: skip
TINY_TOWER = RadioVision(
    hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64, patch_size=4, max_img_size=64, num_cls_tokens=2,
    num_registers=2, min_num_patches=16, max_num_patches=256, max_model_len=512, projector_hidden_size=48,
    text_hidden_size=32,
)  # fmt: skip


def decoder(scale: str, *, experts: bool = False, layers: bool = False) -> DecoderConfig:
    """The 8B-class decoder, or the one with experts; `layers`: one layer of each kind alone."""
    if experts:
        return (_NANO_3_30B if scale == "full" else _TINY_30B).decoder
    config = _NEMOTRON_9B if scale == "full" else _TINY_9B
    return (replace(config, pattern="M-*") if layers else config).decoder


def delta_decoder(scale: str) -> DecoderConfig:
    """One layer of each kind of a model with the gated delta rule."""
    full = scale == "full"
    layers = tuple(Layer(((name, spec),)) for name, spec in (_QWEN_35B if full else _TINY_QWEN).items())
    return DecoderConfig(248320 if full else 97, 2048 if full else 32, layers, 1e-6, position_axes=3)


def tower(scale: str, *, layers: int | None = None) -> RadioVision:
    """RADIO-H, or its first layers."""
    config = RADIO_H if scale == "full" else TINY_TOWER
    return config if layers is None else replace(config, num_layers=layers)


def weights(shapes: dict[str, tuple[int, ...]], device: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Random weights by name, the same for each call on a device, scaled so that activations stay near 1."""
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in shapes.items():
        if name.endswith("A_log"):
            tensor = torch.rand(shape, generator=generator, device=device) * 2 - 1
        elif "norm" in name and name.endswith("weight") or name.endswith((".D", "lambda1")):
            tensor = torch.rand(shape, generator=generator, device=device) * 0.2 + 0.9
        else:
            fan = shape[-1] if len(shape) > 1 else 100
            tensor = torch.randn(shape, generator=generator, device=device) / fan**0.5
        if name == "model.embeddings.weight":
            tensor *= shape[-1] ** 0.5
        yield name, tensor.to(dtype)


def noise_image(config: RadioVision, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> EncoderItem:
    """Patches of a noise image."""
    generator = torch.Generator().manual_seed(1000 * rows + columns + 7919 * seed)
    patches = torch.randn(rows * columns, config.patch_dim, generator=generator).to(dtype)
    return EncoderItem((rows, columns), patches, merge_size=config.merge_size)
