"""The family's models in GGUF files: llama.cpp's architectures `lfm2` and `lfm2moe`.

Source: `conversion/lfm2.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from families.gguf_model import GgufModel, Layout, Made, linear, renamed
from families.gguf_weights import Names, convolution, stacked_rows, vector
from families.lfm2.config import ATTENTION, CONVOLUTION, THETA

SIGMOID = 2
"""The number of this routing in files."""
_LAYER: Names = {
    "attn_norm.weight": "operator_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "shortconv.conv.weight": ("conv.conv.weight", None, convolution),
    "shortconv.conv.bias": "conv.conv.bias",
    **linear("shortconv.in_proj", "conv.in_proj"),
    **linear("shortconv.out_proj", "conv.out_proj"),
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.out_proj.weight",
    "attn_q_norm.weight": "self_attn.q_layernorm.weight",
    "attn_k_norm.weight": "self_attn.k_layernorm.weight",
    "ffn_gate.weight": "feed_forward.w1.weight",
    "ffn_up.weight": "feed_forward.w3.weight",
    "ffn_down.weight": "feed_forward.w2.weight",
    "ffn_gate_inp.weight": "feed_forward.gate.weight",
    "exp_probs_b.bias": ("feed_forward.expert_bias", None, vector),
    "ffn_gate_up_exps.weight": "feed_forward.experts.gate_up_proj",
    "ffn_down_exps.weight": "feed_forward.experts.down_proj",
}


def text_config(model: GgufModel, *, moe: bool) -> dict[str, Any]:
    """The fields of the decoder."""
    data = model.metadata
    data.only("attention.causal", True)
    data.only("rope.scaling.type", "none")
    kinds = [ATTENTION if heads else CONVOLUTION for heads in data.by_layer("attention.head_count_kv", model.layers)]
    heads = data.in_layers("attention.head_count", model.layers)
    config: dict[str, Any] = {
        "model_type": "lfm2_moe" if moe else "lfm2",
        "vocab_size": model.vocab_size,
        "hidden_size": data.count("embedding_length"),
        "num_hidden_layers": model.layers,
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": data.in_layers("attention.head_count_kv", model.layers) if ATTENTION in kinds else heads,
        "intermediate_size": data.in_layers("feed_forward_length", model.layers),
        "conv_L_cache": data.count("shortconv.l_cache"),
        "conv_bias": model.has("shortconv.in_proj.bias"),
        "max_position_embeddings": data.count("context_length"),
        "norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": data.number("rope.freq_base", THETA)},
        "tie_word_embeddings": model.tied,
    }
    if not moe:
        return config | {"block_auto_adjust_ff_dim": False}
    data.only("expert_gating_func", SIGMOID)
    model.defaults.append("weights of chosen experts add up to 1 (norm_topk_prob, routed_scaling_factor)")
    return config | {
        "num_dense_layers": data.count("leading_dense_block_count", least=0),
        "num_experts": data.count("expert_count"),
        "num_experts_per_tok": data.count("expert_used_count"),
        "moe_intermediate_size": data.count("expert_feed_forward_length"),
        "use_expert_bias": model.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def decoder(model: GgufModel, prefix: str = "model.") -> Iterator[Made]:
    """The decoder's weights. `prefix`: what precedes published names other than that of the projection to the
    vocabulary."""
    yield Made(f"{prefix}embed_tokens.weight", ("token_embd.weight",))
    yield Made(f"{prefix}embedding_norm.weight", ("token_embd_norm.weight",))
    yield Made("lm_head.weight", ("output.weight",))
    for index in range(model.layers):
        theirs, ours = f"blk.{index}.", f"{prefix}layers.{index}."
        yield from renamed(model, theirs, ours, _LAYER)
        both = (f"{theirs}ffn_gate_exps.weight", f"{theirs}ffn_up_exps.weight")
        yield Made(f"{ours}feed_forward.experts.gate_up_proj", both, stacked_rows)


def _files(model: GgufModel, *, moe: bool) -> dict[str, dict[str, Any]]:
    name = "Lfm2MoeForCausalLM" if moe else "Lfm2ForCausalLM"
    return {"config.json": {"architectures": [name], **text_config(model, moe=moe)}}


LAYOUTS = tuple(Layout(name, partial(_files, moe=moe), decoder) for name, moe in (("lfm2", False), ("lfm2moe", True)))
