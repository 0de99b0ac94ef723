"""`config.json` -> `DecoderConfig`. Reference: transformers, models/zamba2/modeling_zamba2.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Mlp, SharedBlock
from decoder.layers.recurrent_descriptions import Mamba2
from decoder.layers.spec import Layer
from families import fields
from families.files import CheckpointError, checkpoint_errors, first

KINDS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}
"""Kinds of layers by either spelling; a hybrid layer has a branch."""
_NAMES = {
    "mamba_num_heads": "n_mamba_heads", "n_groups": "mamba_ngroups", "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv", "mlp_hidden_act": "hidden_act", "rank": "adapter_rank",
}  # fmt: skip
"""Fields of descriptions -> fields of files."""


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    fields.required(text, "vocab_size", "hidden_size", "num_hidden_layers")
    hidden = fields.count(text, "hidden_size")
    fields.only(text, "use_conv_bias", True)
    fields.only(text, "use_long_context", False)
    fields.only(text, "tie_word_embeddings", True)  # without it, transformers does not share blocks either
    eps = fields.number(text, "rms_norm_eps", 1e-5)
    with checkpoint_errors(fields.CONFIG, _NAMES):
        mamba, block = _mamba(text, hidden), _block(text, hidden)
    named = next((name for name in ("layers_block_type", "layer_types") if text.get(name) is not None), None)
    [kinds] = fields.required(text, named or "layers_block_type")
    count = fields.count(text, "num_hidden_layers", most=fields.MOST_LAYERS)
    kinds = fields.layer_kinds(kinds, count, named or "", KINDS)
    blocks = fields.count(text, "num_mem_blocks", 1)
    hybrid = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    branches = {
        index: replace(block, owner=hybrid[use % blocks] if use >= blocks else None) for use, index in enumerate(hybrid)
    }
    return DecoderConfig(
        vocab_size=fields.count(text, "vocab_size"),
        hidden_size=hidden,
        layers=tuple(
            Layer((("mixer", mamba),), branch=("block", branches[index]) if index in branches else None)
            for index in range(count)
        ),
        norm_eps=eps,
        tie_word_embeddings=True,
        max_position_embeddings=fields.count(text, "max_position_embeddings", 4096),
        position_axes=int(bool(hybrid) and block.rope is not None),
    )


def _mamba(text: Mapping[str, Any], hidden: int) -> Mamba2:
    expand, heads = fields.count(text, "mamba_expand", 2), fields.count(text, "n_mamba_heads", 8)
    if expand * hidden % heads:
        raise CheckpointError(
            f"config.json: n_mamba_heads {heads} does not divide mamba_expand {expand} x hidden_size {hidden}"
        )
    return Mamba2(
        hidden_size=hidden,
        mamba_num_heads=heads,
        mamba_head_dim=expand * hidden // heads,
        n_groups=fields.count(text, "mamba_ngroups", 1),
        ssm_state_size=fields.count(text, "mamba_d_state", 64),
        conv_kernel=fields.count(text, "mamba_d_conv", 4),
        chunk_size=fields.count(text, "chunk_size", 256),
        time_step_limit=fields.time_steps(text),
        use_bias=fields.flag(text, "add_bias_linear"),
        norm_eps=1e-5,  # whatever rms_norm_eps is
    )


def _block(text: Mapping[str, Any], hidden: int) -> SharedBlock:
    heads = fields.count(text, "num_attention_heads", 32)
    adapters = fields.flag(text, "use_shared_attention_adapter")
    kv_heads = fields.count(text, "num_key_value_heads", heads)
    if 2 * hidden % heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} does not divide twice the hidden_size {hidden}"
        )
    if adapters and kv_heads != heads:
        raise CheckpointError(
            f"config.json: num_key_value_heads is {kv_heads} and num_attention_heads {heads}; they must be equal with "
            "use_shared_attention_adapter"
        )
    width = 2 * hidden // heads
    attention = Attention(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        scale=(width / 2) ** -0.5,
        rope=fields.rope(text, width) if fields.flag(text, "use_mem_rope") else None,
        input_size=2 * hidden,
    )
    mlp = Mlp(
        hidden,
        fields.count(text, "intermediate_size", 4 * hidden),
        first(text, "hidden_act", default="gelu"),
        gated=True,
        mlp_bias=fields.flag(text, "add_bias_linear"),
    )
    return SharedBlock(attention, mlp, fields.count(text, "adapter_rank", 128), adapters)


read_config = fields.text_only(decoder_config)
