"""`config.json` -> `DecoderConfig`. Reference: transformers, models/bamba/modeling_bamba.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Mlp
from decoder.layers.spec import Layer, MixerSpec
from families import fields
from families.files import CheckpointError, first

ROTATED = 0.5
"""Default share of each head that has rotary positions: that of all published models."""
KV_HEADS = 8
"""Key and value heads of files without the field."""


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    vocab, hidden, inner, layers = fields.model_sizes(text, "intermediate_size")
    fields.only(text, "hidden_act", "silu")
    fields.only(text, "is_causal", True)
    eps = fields.number(text, "rms_norm_eps", 1e-5)
    rotated = fields.share(fields.rope_parameters(text), "partial_rotary_factor", ROTATED)
    kinds: dict[str, MixerSpec] = {
        "mamba": fields.mamba2(text, hidden, eps),
        "attention": fields.attention(text, hidden, rotated=rotated, kv_heads=KV_HEADS),
    }
    mlp = Mlp(hidden, inner, "silu", gated=True, mlp_bias=fields.flag(text, "mlp_bias"))
    attention_layers = _attention_layers(text, layers)
    found = []
    for index in range(layers):
        mixer = kinds["attention" if index in attention_layers else "mamba"]
        found += [Layer((("mixer", mixer),)), Layer((("mixer", mlp),))]
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(found),
        norm_eps=eps,
        tie_word_embeddings=fields.flag(text, "tie_word_embeddings"),
        max_position_embeddings=fields.count(text, "max_position_embeddings", 262144),
        position_axes=int(bool(attention_layers)),
    )


def _attention_layers(text: Mapping[str, Any], layers: int) -> set[int]:
    """The indices of the attention layers. Raises CheckpointError."""
    found = first(text, "attn_layer_indices", default=[])
    if not isinstance(found, list) or any(type(index) is not int for index in found):
        raise CheckpointError(f"config.json: attn_layer_indices must be a list of whole numbers, not {found!r}")
    if beyond := sorted(index for index in found if not 0 <= index < layers):
        raise CheckpointError(
            f"config.json: attn_layer_indices names layer {beyond[0]} of {layers} (num_hidden_layers)"
        )
    return set(found)


read_config = fields.text_only(decoder_config)
