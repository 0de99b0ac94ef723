"""The family's models in GGUF files: llama.cpp's architecture `falcon-h1`.

The converter multiplies weights by the model's constants, so here all constants are 1.

Source: `conversion/falcon_h1.py` of llama.cpp, and `src/models/mamba-base.cpp` for the order of gate and norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from families.gguf_model import GgufModel, Layout, Made, linear, renamed
from families.gguf_weights import MAMBA2

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    "ffn_norm": "pre_ff_layernorm.weight",  # as the converter writes it
    **linear("attn_q", "self_attn.q_proj"),
    **linear("attn_k", "self_attn.k_proj"),
    **linear("attn_v", "self_attn.v_proj"),
    **linear("attn_output", "self_attn.o_proj"),
    **linear("ffn_gate", "feed_forward.gate_proj"),
    **linear("ffn_up", "feed_forward.up_proj"),
    **linear("ffn_down", "feed_forward.down_proj"),
}
_CONSTANTS = ("embedding", "lm_head", "ssm_in", "ssm_out", "attention_in", "attention_out", "key")


def _files(model: GgufModel) -> dict[str, dict[str, Any]]:
    data, hidden = model.metadata, model.metadata.count("embedding_length")
    data.only("rope.scaling.type", "none")
    config: dict[str, Any] = {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "vocab_size": model.vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": model.layers,
        "intermediate_size": data.in_layers("feed_forward_length", model.layers),
        "num_attention_heads": data.in_layers("attention.head_count", model.layers),
        "num_key_value_heads": data.in_layers("attention.head_count_kv", model.layers),
        "head_dim": data.count("attention.key_length"),
        "attention_bias": model.has("attn_q.bias"),
        "mlp_bias": model.has("ffn_gate.bias"),
        "projectors_bias": model.has("ssm_out.bias"),
        "mamba_d_ssm": data.count("ssm.inner_size"),
        "mamba_n_heads": data.count("ssm.time_step_rank"),
        "mamba_d_head": "auto",
        "mamba_n_groups": data.count("ssm.group_count"),
        "mamba_d_state": data.count("ssm.state_size"),
        "mamba_d_conv": data.count("ssm.conv_kernel"),
        "mamba_conv_bias": model.has("ssm_conv1d.bias"),
        "mamba_proj_bias": model.has("ssm_in.bias"),
        "mamba_rms_norm": model.has("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "max_position_embeddings": data.count("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": data.number("rope.freq_base")},
        "tie_word_embeddings": model.tied,
        **{f"{name}_multiplier": 1.0 for name in _CONSTANTS},
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0] * 2,
    }
    return {"config.json": config}


def _weights(model: GgufModel) -> Iterator[Made]:
    yield Made("model.embed_tokens.weight", ("token_embd.weight",))
    yield Made("model.final_layernorm.weight", ("output_norm.weight",))
    yield Made("lm_head.weight", ("output.weight",))
    for index in range(model.layers):
        theirs, ours = f"blk.{index}.", f"model.layers.{index}."
        yield from renamed(model, theirs, ours, _LAYER)
        yield from renamed(model, theirs, f"{ours}mamba.", MAMBA2)


LAYOUTS = (Layout("falcon-h1", _files, _weights),)
