"""`config.json` -> `DecoderConfig`. Reference: transformers, models/olmo_hybrid/modeling_olmo_hybrid.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Mlp
from decoder.layers.recurrent_descriptions import GatedDelta
from decoder.layers.spec import Layer
from families import fields
from families.files import checkpoint_errors, first
from kernels.rope import Rope

GATED_NORM_EPS = 1e-5
"""Epsilon of the norm of a gated delta layer's output, whatever `rms_norm_eps` is."""


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    vocab, hidden, inner, layers = fields.model_sizes(text, "intermediate_size")
    fields.only(text, "hidden_act", "silu")
    eps, heads = fields.number(text, "rms_norm_eps", 1e-6), fields.count(text, "num_attention_heads", 30)
    attention = fields.attention({"num_attention_heads": heads, **text}, hidden)
    rope = _rope(text, attention.head_dim)
    attention = replace(attention, rope=rope, qk_norm=eps, qk_norm_whole=True)
    delta, mlp = _delta(text, hidden, heads), Mlp(hidden, inner, "silu", gated=True)
    found = []
    for kind in _kinds(text, layers):
        after = kind == "attention"
        for each in (attention if after else delta, mlp):
            found.append(Layer((("mixer", each),), norm_before=not after, norm_after=after))
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(found),
        norm_eps=eps,
        tie_word_embeddings=fields.flag(text, "tie_word_embeddings"),
        max_position_embeddings=fields.count(text, "max_position_embeddings", 65536),
        position_axes=int(rope is not None and any(layer.norm_after for layer in found)),
    )


def _kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """`mamba` (for the gated delta rule) or `attention` of each layer; by default every fourth one is attention, or the
    last one of fewer."""
    usual = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    default = [usual[index % len(usual)] for index in range(layers)]
    if layers < len(usual):
        default[-1] = "full_attention"
    return fields.layer_kinds(first(text, "layer_types", default=default), layers, "layer_types")


def _delta(text: Mapping[str, Any], hidden: int, heads: int) -> GatedDelta:
    key_heads = fields.count(text, "linear_num_key_heads", heads)
    width = fields.count(text, "linear_key_head_dim", int(0.75 * hidden / key_heads))
    with checkpoint_errors(fields.CONFIG, fields.DELTA_NAMES):
        return GatedDelta(
            hidden_size=hidden,
            num_key_heads=key_heads,
            num_value_heads=fields.count(text, "linear_num_value_heads", heads),
            key_head_dim=width,
            value_head_dim=fields.count(text, "linear_value_head_dim", 2 * width),
            conv_kernel=fields.count(text, "linear_conv_kernel_dim", 4),
            norm_eps=GATED_NORM_EPS,
            beta_scale=2.0 if fields.flag(text, "linear_allow_neg_eigval", True) else 1.0,
            separate=True,
        )


def _rope(text: Mapping[str, Any], width: int) -> Rope | None:
    """None for models without positions: those whose `rope_theta`, in `rope_parameters` or beside it, is null or
    absent, as in all released files."""
    theta = first(fields.rope_parameters(text), "rope_theta", default=first(text, "rope_theta"))
    return None if theta is None else fields.rope(text, width)


read_config = fields.text_only(decoder_config)
