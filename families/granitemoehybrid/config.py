"""`config.json` -> `DecoderConfig`. Reference: transformers, models/granitemoehybrid/modeling_granitemoehybrid.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Experts, Mlp
from decoder.layers.spec import Layer, MixerSpec
from families import fields
from families.files import CheckpointError, checkpoint_errors, first


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    vocab, hidden, shared, layers = fields.model_sizes(text, "shared_intermediate_size")
    fields.only(text, "hidden_act", "silu")
    fields.only(text, "is_causal", True)
    eps = fields.number(text, "rms_norm_eps", 1e-6)
    rotary = _rotary(text)
    # Null is the usual scale of attention, as in transformers.
    usual = text.get("attention_multiplier", 1.0) is None
    scale = None if usual else fields.number(text, "attention_multiplier", 1.0)
    mixers: dict[str, MixerSpec] = {
        "mamba": fields.mamba2(text, hidden, eps),
        "attention": fields.attention(text, hidden, rotated=float(rotary), scale=scale),
    }
    named = next((name for name in ("layers_block_type", "layer_types") if text.get(name) is not None), "layer_types")
    kinds = fields.layer_kinds(first(text, named, default=["mamba"] * layers), layers, named)
    residual = fields.number(text, "residual_multiplier", 1.0)
    feed_forward = _feed_forward(text, hidden, shared)
    found = []
    for kind in kinds:
        found += [Layer((("mixer", mixers[kind]),), residual), Layer(feed_forward, residual)]
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(found),
        norm_eps=eps,
        tie_word_embeddings=fields.flag(text, "tie_word_embeddings"),
        embedding_scale=fields.number(text, "embedding_multiplier", 1.0),
        logits_scale=1.0 / fields.number(text, "logits_scaling", 1.0),
        max_position_embeddings=fields.count(text, "max_position_embeddings", 2048),
        position_axes=int(rotary and "attention" in kinds),
    )


def _rotary(text: Mapping[str, Any]) -> bool:
    """Whether attention has rotary positions. Raises CheckpointError for other kinds of positions."""
    kind = text.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise CheckpointError(f"config.json: position_embedding_type is {kind!r}; 'rope', 'nope' and null are served")
    return kind == "rope"


def _feed_forward(text: Mapping[str, Any], hidden: int, shared: int) -> tuple[tuple[str, MixerSpec], ...]:
    """The layer after each mixer: routed experts if the model has any, and the shared MLP."""
    mlp = ("shared_mlp", Mlp(hidden, shared, "silu", gated=True))
    if first(text, "num_local_experts") == 0:
        return (mlp,)
    with checkpoint_errors(fields.CONFIG, {"n_routed_experts": "num_local_experts"}):
        experts = Experts(
            hidden_size=hidden,
            n_routed_experts=fields.count(text, "num_local_experts", 8),
            num_experts_per_tok=fields.count(text, "num_experts_per_tok", 2),
            moe_intermediate_size=fields.count(text, "intermediate_size"),
            moe_shared_expert_intermediate_size=None,
            mlp_hidden_act="silu",
            gated=True,
            routing="softmax",
        )
    return ("moe", experts), mlp


read_config = fields.text_only(decoder_config)
