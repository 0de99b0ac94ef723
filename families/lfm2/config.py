"""`config.json` -> `DecoderConfig`. Reference: transformers, models/lfm2 and models/lfm2_moe.

Other families whose decoder is LFM2 call `decoder_config` with the section of their file about the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.recurrent_descriptions import ShortConv
from decoder.layers.spec import Layer, MixerSpec
from families import fields
from families.files import CheckpointError, checkpoint_errors, first

THETA = 1000000.0
"""Default base of the rotary frequencies."""
KV_HEADS = 8
"""Key and value heads of files without the field."""
CONVOLUTION, ATTENTION = "conv", "full_attention"


def decoder_config(text: Mapping[str, Any], *, moe: bool = False) -> DecoderConfig:
    """Reads the decoder's fields. `moe`: those of `lfm2_moe`, in which all layers but the first have experts. Raises
    CheckpointError naming the field at fault."""
    with checkpoint_errors("config.json"):
        return _decoder_config(text, moe)


def _decoder_config(text: Mapping[str, Any], moe: bool) -> DecoderConfig:
    fields.required(text, "vocab_size", "hidden_size", "num_hidden_layers", *("layer_types",) * moe)
    vocab, hidden = (fields.count(text, name) for name in ("vocab_size", "hidden_size"))
    layers = fields.count(text, "num_hidden_layers", most=fields.MOST_LAYERS)
    fields.only(text, "hidden_act", "silu")
    fields.only(text, "is_causal", True)
    fields.only(text, "attention_bias", False)
    # The released files have these, and transformers does not read them.
    fields.only(text, "block_use_swiglu", True)
    fields.only(text, "use_pos_enc", True)
    eps = fields.number(text, "norm_eps", 1e-5)
    kinds = layer_kinds(text, layers)
    mixers: dict[str, MixerSpec] = {CONVOLUTION: short_conv(text, hidden), ATTENTION: attention(text, hidden, eps)}
    mlp = Mlp(hidden, fields.count(text, "intermediate_size", 7168) if moe else inner_width(text), "silu", gated=True)
    routed, dense = (experts(text, hidden), dense_layers(text)) if moe else (mlp, layers)
    found = []
    for index, kind in enumerate(kinds):
        follows = mlp if index < dense else routed
        found += [Layer((("mixer", mixers[kind]),)), Layer((("mixer", follows),))]
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        layers=tuple(found),
        norm_eps=eps,
        tie_word_embeddings=tied(text),
        max_position_embeddings=fields.count(text, "max_position_embeddings", 128000),
        position_axes=int(ATTENTION in kinds),
    )


def tied(text: Mapping[str, Any]) -> bool:
    """Whether the table of embeddings is the vocabulary projection; the older name of the field goes first."""
    return fields.flag(text, "tie_embedding", fields.flag(text, "tie_word_embeddings", True, null=False), null=False)


def inner_width(text: Mapping[str, Any]) -> int:
    """Width of the MLPs: `block_ff_dim`, the older name, which goes first, or `intermediate_size`; two thirds of it if
    `block_auto_adjust_ff_dim`, times `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`.
    Without a multiplier (null) nothing is rounded, as in transformers."""
    name = "intermediate_size" if text.get("block_ff_dim") is None else "block_ff_dim"
    width = fields.count(text, name, 12288)
    if not fields.flag(text, "block_auto_adjust_ff_dim", True, null=False):
        return width
    adjusted = int(2 * width / 3)
    if text.get("block_ffn_dim_multiplier", 1.0) is not None:
        multiple = fields.count(text, "block_multiple_of", 256)
        adjusted = int(fields.number(text, "block_ffn_dim_multiplier", 1.0) * adjusted)
        adjusted = -(-adjusted // multiple) * multiple
    if adjusted < 1:
        raise CheckpointError(
            f"config.json: {name} {width} with block_auto_adjust_ff_dim makes MLPs of width {adjusted}; at least 1 is "
            "needed"
        )
    return adjusted


def layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """`conv` or `full_attention` for each layer, from `layer_types`, or from `full_attn_idxs` of older files, without
    which every layer is attention. Raises CheckpointError."""
    if (kinds := text.get("layer_types")) is None:
        return _listed(text, layers)
    return fields.layer_kinds(kinds, layers, "layer_types", {kind: kind for kind in (CONVOLUTION, ATTENTION)})


def _listed(text: Mapping[str, Any], layers: int) -> list[str]:
    found = text.get("full_attn_idxs")
    if found is None:
        return [ATTENTION] * layers
    if not isinstance(found, list) or any(type(index) is not int for index in found):
        raise CheckpointError(f"config.json: full_attn_idxs must be a list of whole numbers, not {found!r}")
    if beyond := sorted(index for index in found if not 0 <= index < layers):
        raise CheckpointError(f"config.json: full_attn_idxs names layer {beyond[0]} of {layers} (num_hidden_layers)")
    return [ATTENTION if index in found else CONVOLUTION for index in range(layers)]


def dense_layers(text: Mapping[str, Any]) -> int:
    """The number of layers, the first ones, that have an MLP in place of experts. Raises CheckpointError."""
    found = first(text, "num_dense_layers", default=2)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise CheckpointError(f"config.json: num_dense_layers must be a whole number of at least 0, not {found!r}")
    return found


def experts(text: Mapping[str, Any], hidden: int) -> Experts:
    """Reads the experts' fields. Raises CheckpointError."""
    with checkpoint_errors(fields.CONFIG, fields.EXPERT_NAMES):
        return Experts(
            hidden_size=hidden,
            n_routed_experts=fields.count(text, "num_experts", 32),
            num_experts_per_tok=fields.count(text, "num_experts_per_tok", 4),
            moe_intermediate_size=fields.count(text, "moe_intermediate_size", 1792),
            moe_shared_expert_intermediate_size=None,
            mlp_hidden_act="silu",
            gated=True,
            norm_topk_prob=fields.flag(text, "norm_topk_prob", True, null=False),
            routed_scaling_factor=fields.number(text, "routed_scaling_factor", 1.0),
            correction=fields.flag(text, "use_expert_bias", True, null=False),
            weight_epsilon=1e-6,
        )


def short_conv(text: Mapping[str, Any], hidden: int) -> ShortConv:
    """Reads the convolution's fields. Raises CheckpointError."""
    taps = fields.count(text, "conv_L_cache", 3)
    if taps < 2:
        raise CheckpointError(f"config.json: conv_L_cache is {taps}; at least 2 taps are served")
    return ShortConv(hidden, taps, fields.flag(text, "conv_bias", null=False))


def attention(text: Mapping[str, Any], hidden: int, eps: float) -> Attention:
    """Reads the attention fields: whole heads are rotated. Raises CheckpointError."""
    fields.only(fields.rope_parameters(text), "partial_rotary_factor", 1.0)
    heads = fields.count(text, "num_attention_heads", 32)
    width = fields.head_width(text, hidden, heads)
    absent = heads if "num_key_value_heads" in text else KV_HEADS
    return Attention(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=fields.count(text, "num_key_value_heads", absent),
        head_dim=width,
        rope=fields.rope(text, width, theta=THETA),
        qk_norm=eps,
    )


read_config = fields.text_only(decoder_config)
read_moe_config = fields.text_only(partial(decoder_config, moe=True))
