"""The family's models in GGUF files: llama.cpp's architecture `granitehybrid`.

Source: `conversion/granite.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from families.files import CheckpointError
from families.gguf_model import GgufModel, Layout, Made, linear, renamed
from families.gguf_weights import MAMBA2, stacked_rows, unpaired

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **linear("attn_v", "self_attn.v_proj"),
    **linear("attn_output", "self_attn.o_proj"),
    "ffn_down.weight": "shared_mlp.output_linear.weight",
    "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    "ffn_gate_inp.weight": "block_sparse_moe.router.layer.weight",
    "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
}
_GATED = {
    "": "shared_mlp.input_linear.weight",
    "_shexp": "shared_mlp.input_linear.weight",
    "_exps": "block_sparse_moe.input_linear.weight",
}
"""End of the names of gate and up projections -> the published tensor of both."""


def _kinds(model: GgufModel) -> list[str]:
    heads = model.metadata.by_layer("attention.head_count_kv", model.layers)
    return ["attention" if count else "mamba" for count in heads]


def _kv_heads(model: GgufModel) -> int:
    """Key and value heads; those of queries if there is no attention."""
    data, name = model.metadata, "attention.head_count_kv"
    return data.in_layers(name, model.layers) if "attention" in _kinds(model) else data.count("attention.head_count")


def _files(model: GgufModel) -> dict[str, dict[str, Any]]:
    data, kinds = model.metadata, _kinds(model)
    if data.flag("rope.scaling.finetuned", False):
        raise CheckpointError(
            f"{data.file}: {data.key('rope.scaling.finetuned')} is true: it is a Bamba model, which cannot be converted"
        )
    hidden, inner = data.count("embedding_length"), data.count("ssm.inner_size")
    experts = data.count("expert_count", 0, least=0)
    if inner % hidden:
        raise CheckpointError(f"{data.file}: {data.key('ssm.inner_size')} {inner} is no multiple of {hidden}")
    config: dict[str, Any] = {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "vocab_size": model.vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": model.layers,
        "layer_types": kinds,
        "num_attention_heads": data.count("attention.head_count"),
        "num_key_value_heads": _kv_heads(model),
        "attention_bias": model.has("attn_q.bias"),
        "position_embedding_type": "nope",
        "shared_intermediate_size": data.count("expert_shared_feed_forward_length"),
        "intermediate_size": data.in_layers("feed_forward_length", model.layers),
        "num_local_experts": experts,
        "num_experts_per_tok": data.count("expert_used_count") if experts else 0,
        "mamba_n_heads": data.count("ssm.time_step_rank"),
        "mamba_d_head": "auto",
        "mamba_expand": inner // hidden,
        "mamba_n_groups": data.count("ssm.group_count"),
        "mamba_d_state": data.count("ssm.state_size"),
        "mamba_d_conv": data.count("ssm.conv_kernel"),
        "mamba_conv_bias": model.has("ssm_conv1d.bias"),
        "mamba_proj_bias": model.has("ssm_in.bias"),
        "max_position_embeddings": data.count("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "attention_multiplier": data.number("attention.scale", 1.0),
        "embedding_multiplier": data.number("embedding_scale", 1.0),
        "residual_multiplier": data.number("residual_scale", 1.0),
        "logits_scaling": data.number("logit_scale", 1.0),
        "tie_word_embeddings": model.tied,
    }
    return {"config.json": config}


def _weights(model: GgufModel) -> Iterator[Made]:
    yield Made("model.embed_tokens.weight", ("token_embd.weight",))
    yield Made("model.norm.weight", ("output_norm.weight",))
    yield Made("lm_head.weight", ("output.weight",))
    heads = {"q": model.metadata.count("attention.head_count"), "k": _kv_heads(model)}
    for index in range(model.layers):
        theirs, ours = f"blk.{index}.", f"model.layers.{index}."
        yield from renamed(model, theirs, ours, _LAYER)
        yield from renamed(model, theirs, f"{ours}mamba.", MAMBA2)
        for letter, count in heads.items():
            rows = partial(unpaired, heads=count)
            for part in ("weight", "bias"):
                yield Made(f"{ours}self_attn.{letter}_proj.{part}", (f"{theirs}attn_{letter}.{part}",), rows)
        for end, both in _GATED.items():
            sources = f"{theirs}ffn_gate{end}.weight", f"{theirs}ffn_up{end}.weight"
            yield Made(ours + both, sources, stacked_rows)


LAYOUTS = (Layout("granitehybrid", _files, _weights),)
