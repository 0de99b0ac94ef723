"""`config.json` of published Qwen3.5 checkpoints, with the nesting and the fields of the files."""

from __future__ import annotations

from typing import Any

# hidden, layers, heads, kv heads, MLP width or (experts, chosen, width, shared width), value heads, tied
PUBLISHED: dict[str, tuple[int, int, int, int, int | tuple[int, int, int, int], int, bool]] = {
    "0.8B": (1024, 24, 8, 2, 3584, 16, True),
    "2B": (2048, 24, 8, 2, 6144, 16, True),
    "4B": (2560, 32, 16, 4, 9216, 32, True),
    "9B": (4096, 32, 16, 4, 12288, 32, False),
    "27B": (5120, 64, 24, 4, 17408, 48, False),
    "35B-A3B": (2048, 40, 16, 2, (256, 8, 512, 512), 32, False),
}
# depth, width, heads, MLP width of the tower
TOWERS = {
    "0.8B": (12, 768, 12, 3072),
    "2B": (24, 1024, 16, 4096),
    "4B": (24, 1024, 16, 4096),
    "9B": (27, 1152, 16, 4304),
    "27B": (27, 1152, 16, 4304),
    "35B-A3B": (27, 1152, 16, 4304),
}


def published(name: str) -> dict[str, Any]:
    """A new object for each call, so that tests may change it."""
    hidden, layers, heads, kv, inner, values, tied = PUBLISHED[name]
    depth, width, vision_heads, vision_inner = TOWERS[name]
    moe = not isinstance(inner, int)
    whole = "qwen3_5_moe" if moe else "qwen3_5"
    feed_forward: dict[str, Any] = {"intermediate_size": inner}
    if not isinstance(inner, int):
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        feed_forward = dict(zip(names, inner)) | {"router_aux_loss_coef": 0.001, "output_router_logits": False}
    kinds = ["full_attention" if (index + 1) % 4 == 0 else "linear_attention" for index in range(layers)]
    return {
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "image_token_id": 248056,
        "language_model_only": False,
        "model_type": whole,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "bos_token_id": 248044,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "initializer_range": 0.02,
            **feed_forward,
            "layer_types": kinds,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": values,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": f"{whole}_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": kv,
            "output_gate_type": "swish",
            "pad_token_id": None,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": tied,
            "use_cache": True,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.1",
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": width,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": vision_inner,
            "model_type": whole,
            "num_heads": vision_heads,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }
