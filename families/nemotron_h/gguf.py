"""The family's models in GGUF files: llama.cpp's architectures `nemotron_h` and `nemotron_h_moe`.

Source: `conversion/nemotron.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from families.gguf_model import GgufModel, Layout, Made, linear, renamed
from families.gguf_weights import MAMBA2, Names, unpaired, vector

_KINDS = {"M": "ssm_in.weight", "*": "attn_q.weight", "E": "ffn_up_exps.weight", "-": "ffn_up.weight"}
"""Letter of a kind of layer -> a tensor that only this kind has."""
_FEED_FORWARD: Names = {
    **linear("ffn_up", "mixer.up_proj"),
    **linear("ffn_down", "mixer.down_proj"),
    "ffn_gate_inp.weight": "mixer.gate.weight",
    "exp_probs_b.bias": ("mixer.gate.e_score_correction_bias", None, vector),
    "ffn_up_exps.weight": "mixer.experts.up_proj",
    "ffn_down_exps.weight": "mixer.experts.down_proj",
    "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
    "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
    **linear("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    **linear("ffn_down_shexp", "mixer.shared_experts.down_proj"),
}
_HEAD = {
    "nextn.eh_proj.weight": "0.eh_proj.weight",
    "nextn.enorm.weight": "0.enorm.weight",
    "nextn.hnorm.weight": "0.hnorm.weight",
    "attn_norm.weight": "0.norm.weight",
    "post_attention_norm.weight": "1.norm.weight",
    "nextn.shared_head_norm.weight": "1.final_layernorm.weight",
}


def _pattern(model: GgufModel) -> str:
    """One letter for each layer."""

    def kind(index: int) -> str:
        for letter, tensor in _KINDS.items():
            if f"blk.{index}.{tensor}" in model.shapes:
                return letter
        model.shape(f"blk.{index}.{_KINDS['M']}", 2)  # raises: a layer without any
        raise AssertionError(index)

    return "".join(map(kind, range(model.layers)))


def _kv_heads(model: GgufModel) -> int:
    """Key and value heads; those of queries if there is no attention."""
    data, layers = model.metadata, model.layers + model.heads
    if any(data.by_layer("attention.head_count_kv", layers)):
        return data.in_layers("attention.head_count_kv", layers)
    return data.count("attention.head_count")


def _files(model: GgufModel, *, moe: bool) -> dict[str, dict[str, Any]]:
    data, pattern = model.metadata, _pattern(model)
    layers, inner = model.layers + model.heads, data.count("ssm.inner_size")
    heads = data.count("ssm.time_step_rank")
    eps = data.number("attention.layer_norm_rms_epsilon", data.number("attention.layer_norm_epsilon", 1e-5))
    config: dict[str, Any] = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "vocab_size": model.vocab_size,
        "hidden_size": data.count("embedding_length"),
        "tie_word_embeddings": model.tied,
        "layer_norm_epsilon": eps,
        "max_position_embeddings": data.count("context_length"),
        "num_attention_heads": data.count("attention.head_count"),
        "num_key_value_heads": _kv_heads(model),
        "head_dim": data.count("attention.key_length"),
        "attention_bias": model.has("attn_q.bias"),
        "mlp_bias": model.has("ffn_up.bias") or model.has("ffn_up_shexp.bias"),
        "ssm_state_size": data.count("ssm.state_size"),
        "mamba_num_heads": heads,
        "mamba_head_dim": max(1, inner // heads),
        "n_groups": data.count("ssm.group_count"),
        "conv_kernel": data.count("ssm.conv_kernel"),
        "use_conv_bias": model.has("ssm_conv1d.bias"),
        "use_bias": model.has("ssm_in.bias"),
    }
    if "-" in pattern:
        config["intermediate_size"] = data.in_layers("feed_forward_length", layers)
    if moe:
        config |= {
            "n_routed_experts": data.count("expert_count"),
            "num_experts_per_tok": data.count("expert_used_count"),
            "moe_intermediate_size": data.count("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": data.count("expert_shared_feed_forward_length"),
            "n_shared_experts": data.count("expert_shared_count", 1),
            "n_group": data.count("expert_group_count", 1),
            "topk_group": data.count("expert_group_used_count", 1),
            "norm_topk_prob": data.flag("expert_weights_norm", True),
            "routed_scaling_factor": data.number("expert_weights_scale", 1.0),
        }
        if "moe_latent_size" in data:
            config["moe_latent_size"] = data.count("moe_latent_size")
    if model.heads:
        config |= {"num_nextn_predict_layers": model.heads, "mtp_hybrid_override_pattern": "*E"}
    return {"config.json": config}


def _attention(model: GgufModel, theirs: str, ours: str) -> Iterator[Made]:
    """The projections of an attention layer."""
    for letter, heads in (("q", model.metadata.count("attention.head_count")), ("k", _kv_heads(model))):
        rows = partial(unpaired, heads=heads)
        for part in ("weight", "bias"):
            yield Made(f"{ours}{letter}_proj.{part}", (f"{theirs}attn_{letter}.{part}",), rows)
    names = linear("attn_v", "v_proj") | linear("attn_output", "o_proj")
    yield from renamed(model, theirs, ours, names)


def _weights(model: GgufModel) -> Iterator[Made]:
    yield Made("backbone.embeddings.weight", ("token_embd.weight",))
    yield Made("backbone.norm_f.weight", ("output_norm.weight",))
    yield Made("lm_head.weight", ("output.weight",))
    for index in range(model.layers):
        theirs, ours = f"blk.{index}.", f"backbone.layers.{index}."
        yield from renamed(model, theirs, ours, {"attn_norm.weight": "norm.weight", **_FEED_FORWARD})
        yield from renamed(model, theirs, f"{ours}mixer.", MAMBA2)
        yield from _attention(model, theirs, f"{ours}mixer.")
    for index in range(model.layers, model.layers + model.heads):
        theirs = f"blk.{index}."
        yield from renamed(model, theirs, "mtp.layers.", _HEAD)
        yield from _attention(model, theirs, "mtp.layers.0.mixer.")
        yield from renamed(model, theirs, "mtp.layers.1.", _FEED_FORWARD)


LAYOUTS = tuple(
    Layout(name, partial(_files, moe=moe), _weights) for name, moe in (("nemotron_h", False), ("nemotron_h_moe", True))
)
