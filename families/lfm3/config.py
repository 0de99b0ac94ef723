"""`config.json` -> `DecoderConfig`. Reference: transformers, models/lfm3.

Other families whose decoder is LFM3 call `decoder_config` with the section of their file about the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Mlp
from decoder.layers.recurrent_descriptions import ShortConv
from decoder.layers.spec import Layer, MixerSpec
from families import fields
from families.files import CheckpointError, checkpoint_errors, first
from kernels.rope import Rope

CONVOLUTION, FULL, SLIDING = "conv", "full_attention", "sliding_attention"
KINDS = CONVOLUTION, FULL, SLIDING
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}
"""`rope_parameters` of files without the field."""
ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
THETA = 1000000.0
"""Base of the rotary frequencies of kinds without one in `rope_parameters`."""


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    """Reads the decoder's fields. Raises CheckpointError naming the field at fault."""
    with checkpoint_errors("config.json"):
        return _decoder_config(text)


def _decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    # Nested sections are saved without fields that have transformers' defaults.
    vocab, hidden = fields.count(text, "vocab_size", 128000), fields.count(text, "hidden_size", 2048)
    layers = fields.count(text, "num_hidden_layers", 24, most=fields.MOST_LAYERS)
    fields.only(text, "hidden_act", "silu")
    fields.only(text, "is_causal", True)
    eps = fields.number(text, "rms_norm_eps", fields.number(text, "norm_eps", 1e-5))  # an alias, which goes first
    kinds, after = layer_kinds(text, layers), fields.flag(text, "use_sandwich_norm", True, null=False)
    mixers: dict[str, MixerSpec] = {kind: attention(text, hidden, eps, kind) for kind in set(kinds) - {CONVOLUTION}}
    mixers[CONVOLUTION] = short_conv(text, hidden)
    mlp = Mlp(hidden, fields.count(text, "intermediate_size", 7680), "silu", gated=True)
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(Layer((("mixer", each),), norm_after=after) for kind in kinds for each in (mixers[kind], mlp)),
        norm_eps=eps,
        tie_word_embeddings=fields.flag(text, "tie_word_embeddings", True, null=False),
        max_position_embeddings=fields.count(text, "max_position_embeddings", 128000),
        position_axes=int(any(kind != CONVOLUTION for kind in kinds)),
    )


def layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """One of `KINDS` for each layer; without `layer_types`, as in LFM3-1.7B. Raises CheckpointError."""
    if (kinds := text.get("layer_types")) is None:
        return [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONVOLUTION for i in range(layers)]
    return fields.layer_kinds(kinds, layers, "layer_types", {kind: kind for kind in KINDS})


def short_conv(text: Mapping[str, Any], hidden: int) -> ShortConv:
    """Reads the convolution's fields. Raises CheckpointError."""
    taps = fields.count(text, "conv_L_cache", 7)
    if taps < 2:
        raise CheckpointError(f"config.json: conv_L_cache is {taps}; at least 2 taps are served")
    return ShortConv(hidden, taps, fields.flag(text, "conv_bias", null=False))


def attention(text: Mapping[str, Any], hidden: int, eps: float, kind: str) -> Attention:
    """Reads the fields of attention of a kind. Raises CheckpointError."""
    width = fields.count(text, "head_dim", 128, most=fields.WIDEST_HEAD)
    return Attention(
        hidden_size=hidden,
        num_attention_heads=fields.count(text, "num_attention_heads", 16),
        num_key_value_heads=fields.count(text, "num_key_value_heads", 4),
        head_dim=width,
        attention_bias=fields.flag(text, "attention_bias", null=False),
        rope=rope(text, width, kind),
        head_gate=fields.flag(text, "use_attention_gate", True, null=False),
        qk_norm=eps,
        window=fields.count({"sliding_window": 256, **text}, "sliding_window") if kind == SLIDING else None,
    )


def rope(text: Mapping[str, Any], width: int, kind: str) -> Rope:
    """Reads the part of `rope_parameters` about a kind of attention. Raises CheckpointError, also for settings that are
    not served."""
    fields.only(text, "rope_scaling", None)
    fields.only(text, "partial_rotary_factor", 1.0)
    found = ROPE if text.get("rope_parameters") is None else fields.section(text, "rope_parameters")
    if unknown := sorted(set(found) - set(ROPE)):
        raise CheckpointError(f"config.json: rope_parameters has {', '.join(unknown)}; served are {', '.join(ROPE)}")
    [given] = fields.required(found, kind)
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: rope_parameters.{kind} must be an object, not {given!r}")
    if unknown := sorted(set(given) - ROPE_FIELDS):
        raise CheckpointError(f"config.json: rope_parameters.{kind} has {', '.join(unknown)}, which is not served")
    if first(given, "rope_type", "type", default="default") == "default":  # transformers ignores these
        for name in ("partial_rotary_factor", "factor"):
            fields.only(given, name, 1.0)
    theta = fields.number(text, "rope_theta", THETA)
    return fields.rope({"rope_parameters": given}, width, kinds=("default", "proportional"), theta=theta)


read_config = fields.text_only(decoder_config)
