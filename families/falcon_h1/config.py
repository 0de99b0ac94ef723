"""`config.json` -> `DecoderConfig`. Reference: transformers, models/falcon_h1/modeling_falcon_h1.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Mlp
from decoder.layers.spec import Layer
from families import fields
from families.falcon_h1.multipliers import Multipliers

KV_HEADS = 8
"""Key and value heads of files without the field."""
INNER = 1024
"""`mamba_d_ssm` of files without the field."""


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    vocab, hidden, inner, layers = fields.model_sizes(text, "intermediate_size")
    fields.only(text, "hidden_act", "silu")
    fields.only(text, "mamba_use_mlp", True)
    fields.only(text, "attn_layer_indices", None)
    multipliers, eps = Multipliers.read(text), fields.number(text, "rms_norm_eps", 1e-5)
    norm_first = fields.flag(text, "mamba_norm_before_gate", True, null=False)  # as in transformers
    normed = fields.flag(text, "mamba_rms_norm")
    mamba = fields.mamba2(
        text,
        hidden,
        eps,
        # Null is `mamba_expand` times the hidden size, as in transformers.
        inner=fields.count(text, "mamba_d_ssm", INNER) if text.get("mamba_d_ssm", INNER) is not None else None,
        use_out_bias=fields.flag(text, "projectors_bias"),
        gated_norm=("norm_first" if norm_first else "gate_first") if normed else "gate_only",
        scales=multipliers.mamba_scales,
    )
    width = fields.head_width(text, hidden, fields.count(text, "num_attention_heads", 32))
    attention = fields.attention(
        text, hidden, rotated=1.0, kv_heads=KV_HEADS, scale=width**-0.5 * multipliers.score_scale
    )
    mlp = Mlp(hidden, inner, "silu", gated=True, mlp_bias=fields.flag(text, "mlp_bias"))
    both = Layer((("mamba", mamba), ("self_attn", attention)), scales=multipliers.output_scales)
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=(both, Layer((("feed_forward", mlp),), multipliers.mlp_scale)) * layers,
        norm_eps=eps,
        tie_word_embeddings=fields.flag(text, "tie_word_embeddings"),
        embedding_scale=multipliers.embedding,
        logits_scale=multipliers.logits,
        max_position_embeddings=fields.count(text, "max_position_embeddings", 8192),
        position_axes=1,
    )


read_config = fields.text_only(decoder_config)
