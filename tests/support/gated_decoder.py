"""Decoders with gated, normalised attention and rotary positions on several axes, and positions of prompts with
images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tiny_decoder import delta_config
from torch import Tensor
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5TextRotaryEmbedding

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Mlp
from decoder.layers.spec import Layer, MixerSpec
from decoder.positions import Positions
from kernels.rope import Rope


def interleaved(section: Sequence[int]) -> tuple[int, ...]:
    """The axis of each frequency, interleaved as in Qwen; `section`: numbers of frequencies of time, height and
    width."""
    axes = [0] * sum(section)
    for axis in (1, 2):
        for index in range(axis, 3 * section[axis], 3):
            axes[index] = axis
    return tuple(axes)


def gated(spec: MixerSpec, **changes: Any) -> MixerSpec:
    """An attention configuration of this shape with every optional feature; other mixers are returned unchanged."""
    if not isinstance(spec, Attention):
        return spec
    fields: dict[str, Any] = {"rope": Rope(6, 100.0, interleaved((1, 1, 1))), "gate": True, "qk_norm": 1e-6}
    return replace(spec, **(fields | changes))


def gated_config(pattern: str = "M*-M", *, head_dim: int = 12, mtp: bool = False, **changes: Any) -> DecoderConfig:
    """As `delta_config`; every attention has rotary positions on three axes, a gate and norms.

    G in the pattern is a layer of the gated delta rule. `mtp`: with a multi-token prediction head whose attention has
    another shape than the layers', and a gated MLP. `changes`: fields of the configuration.
    """
    config = delta_config(pattern, head_dim=head_dim)
    layers = tuple(
        Layer(tuple((name, gated(mixer, **changes)) for name, mixer in layer.mixers), layer.residual_scale)
        for layer in config.layers
    )
    head: tuple[MixerSpec, ...] = ()
    if mtp:
        hidden = config.hidden_size
        head = gated(Attention(hidden, 4, 1, head_dim), **changes), Mlp(hidden, 40, "silu", gated=True)
    return replace(config, layers=layers, position_axes=3, mtp=head)


def grid_positions(length: int, *images: tuple[int, int, int]) -> Positions:
    """The positions of a prompt of `length` tokens with images given as (first token, rows, columns).

    As in Qwen: a token in row y and column x of an image at p has (p, p + y, p + x), and the text after it continues at
    p + max(rows, columns).
    """
    found: list[tuple[int, ...]] = []
    at = 0
    for start, rows, columns in images:
        while len(found) < start:
            found.append((at,) * 3)
            at += 1
        found += [(at, at + y, at + x) for y in range(rows) for x in range(columns)]
        at += max(rows, columns)
    while len(found) < length:
        found.append((at,) * 3)
        at += 1
    return Positions(found, at - length)


def published_attention(spec: Attention, weights: Mapping[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """transformers' attention with our weights: normalised rows `[T, d]` of a whole sequence and their positions `[T,
    3]` -> `[T, d]`."""
    assert spec.rope is not None and spec.qk_norm is not None
    published = Qwen3_5TextConfig(
        hidden_size=spec.hidden_size, num_attention_heads=spec.num_attention_heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, attention_bias=spec.attention_bias, rms_norm_eps=spec.qk_norm,
        rope_parameters={
            "rope_type": "default", "rope_theta": spec.rope.theta,
            "mrope_section": [spec.rope.axes.count(axis) for axis in range(3)],
            "partial_rotary_factor": spec.rope.dims / spec.head_dim,
        },
    )  # fmt: skip
    published._attn_implementation = "eager"
    rope, attention = Qwen3_5TextRotaryEmbedding(published), Qwen3_5Attention(published, 0).eval()
    mine = dict(weights)
    for kind in ("weight", "bias") if spec.attention_bias else ("weight",):
        query, gate = (
            mine.pop(f"{name}.{kind}").unflatten(0, (spec.num_attention_heads, spec.head_dim))
            for name in ("q_proj", "gate_proj")
        )
        mine[f"q_proj.{kind}"] = torch.cat((query, gate), 1).flatten(0, 1)
    for name in ("q_norm.weight", "k_norm.weight"):
        mine[name] = mine[name] - 1
    attention.load_state_dict(mine)

    @torch.no_grad()
    def attend(x_TD: Tensor, positions_TA: Tensor) -> Tensor:
        hidden = torch.ones((x_TD.shape[0],) * 2, dtype=torch.bool).triu(1)
        if spec.window is not None:
            hidden |= torch.ones_like(hidden).tril(-spec.window)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
        return attention(x_TD[None], rope(x_TD[None], positions_TA.T[:, None]), mask)[0][0]

    return attend
