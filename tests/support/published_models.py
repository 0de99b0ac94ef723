"""`config.json` of published checkpoints of each family, with the values that are known here."""

from __future__ import annotations

from typing import Any

from published_qwen import PUBLISHED, published


def minicpm() -> dict[str, Any]:
    """MiniCPM-V 4.6: the decoder of Qwen3.5-0.8B under SigLIP2-400M."""
    text = {**published("0.8B")["text_config"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 0}
    return {
        "model_type": "minicpmv4_6",
        "image_token_id": 248056,
        "text_config": text,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "insert_layer_id": 6,
        "vision_config": {
            "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304,
            "patch_size": 14, "image_size": 980,
        },
    }  # fmt: skip


def bamba() -> dict[str, Any]:
    """Bamba-9B."""
    return {
        "model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_chunk_size": 256, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
        "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 128001,
    }  # fmt: skip


def falcon() -> dict[str, Any]:
    """Falcon-H1-0.5B."""
    return {
        "model_type": "falcon_h1", "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
        "mamba_d_conv": 4, "mamba_chunk_size": 128, "mamba_rms_norm": False, "mamba_norm_before_gate": False,
        "attn_layer_indices": None, "rope_theta": 1e11, "rope_scaling": None, "rms_norm_eps": 1e-5,
        "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375, "key_multiplier": 0.39062499999999994, "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.23570226039551587, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "max_position_embeddings": 16384, "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 11,
    }  # fmt: skip


def olmo() -> dict[str, Any]:
    """Olmo-Hybrid-7B."""
    return {
        "model_type": "olmo_hybrid", "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 30, "num_key_value_heads": 30, "linear_num_key_heads": 30,
        "linear_num_value_heads": 30, "linear_key_head_dim": 96, "linear_value_head_dim": 192,
        "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "rope_parameters": None, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536, "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 100257,
    }  # fmt: skip


def qwen_next() -> dict[str, Any]:
    """Qwen3-Next-80B-A3B, also Qwen3-Coder-Next."""
    return {
        "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "partial_rotary_factor": 0.25, "rope_theta": 1e7, "max_position_embeddings": 262144,
        "tie_word_embeddings": False, "dtype": "bfloat16", "eos_token_id": 151645,
    }  # fmt: skip


def lfm2(hidden: int, heads: int, inner: int) -> dict[str, Any]:
    """LFM2 with 16 layers, with the fields of the released files."""
    return {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": hidden, "block_dim": hidden, "conv_dim": hidden,
        "conv_dim_out": hidden, "block_ff_dim": inner, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_use_swiglu": True,
        "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "norm_eps": 1e-5,
        "num_attention_heads": heads, "num_heads": heads, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 128000, "rope_theta": 1e6, "use_pos_enc": True, "torch_dtype": "bfloat16",
        "eos_token_id": 7,
    }  # fmt: skip


def lfm2_moe() -> dict[str, Any]:
    """LFM2-8B-A1B."""
    return {
        "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "moe_intermediate_size": 1792,
        "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "norm_eps": 1e-5,
        "max_position_embeddings": 128000, "rope_theta": 1e6, "dtype": "bfloat16", "eos_token_id": 7,
    }  # fmt: skip


def lfm3() -> dict[str, Any]:
    """LFM3-1.7B, as transformers describes it."""
    kinds = ["conv", *(["conv", "full_attention", "conv", "sliding_attention"] * 6)][:24]
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    return {
        "model_type": "lfm3", "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680, "head_dim": 128,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "layer_types": kinds,
        "conv_L_cache": 7, "conv_bias": False, "norm_eps": 1e-5, "max_position_embeddings": 128000,
        "rope_parameters": {"sliding_attention": sliding, "full_attention": full}, "sliding_window": 256,
        "use_sandwich_norm": True, "use_attention_gate": True, "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 124900,
    }  # fmt: skip


def lfm2_vl(text: dict[str, Any], **vision: int) -> dict[str, Any]:
    """LFM2-VL with this decoder; `vision`: the sizes of the tower."""
    return {
        "model_type": "lfm2_vl", "architectures": ["Lfm2VlForConditionalGeneration"], "dtype": "bfloat16",
        "downsample_factor": 2, "image_token_id": 396, "projector_bias": True, "projector_hidden_act": "gelu",
        "projector_hidden_size": 2048, "projector_use_layernorm": False, "text_config": text,
        "vision_config": {
            "model_type": "siglip2_vision_model", "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
            "num_channels": 3, "num_patches": 256, "patch_size": 16, "vision_use_head": False, **vision,
        },
    }  # fmt: skip


BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
"""Sizes of SigLIP2 towers."""


def lfm3_vl() -> dict[str, Any]:
    """LFM3-VL-2B, as transformers describes it."""
    return {
        "model_type": "lfm3_vl", "architectures": ["Lfm3VlForConditionalGeneration"], "dtype": "bfloat16",
        "image_token_id": 125030, "video_token_id": 125029, "projector_bias": True, "projector_hidden_act": "gelu",
        "projector_hidden_size": 4096, "tie_word_embeddings": True, "text_config": lfm3(),
        "vision_config": {
            "model_type": "lfm3_vl_vision", "hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 14,
            "num_attention_heads": 16, "num_key_value_heads": 8, "patch_size": 16, "conv_kernel_size": 3,
        },
    }  # fmt: skip


def nemotron(pattern: str, **fields: Any) -> dict[str, Any]:
    """A NemotronH decoder with this layer pattern."""
    return {
        "model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern),
        "vocab_size": 131072, "head_dim": 128, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "dtype": "bfloat16", "eos_token_id": 2, **fields,
    }  # fmt: skip


NANO_9B = nemotron(
    "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", hidden_size=4480, num_attention_heads=40,
    num_key_value_heads=8, intermediate_size=15680, mamba_num_heads=128, mamba_head_dim=80,
)  # fmt: skip
NANO_12B = nemotron(
    "M-M-M-M*-" * 6 + "M-M-M-M-", hidden_size=5120, num_attention_heads=40, num_key_value_heads=8,
    intermediate_size=20480, mamba_num_heads=128, mamba_head_dim=80, max_position_embeddings=131072,
)  # fmt: skip
NANO_30B = nemotron(
    "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", hidden_size=2688, num_attention_heads=32,
    num_key_value_heads=2, intermediate_size=1856, mamba_num_heads=64, mamba_head_dim=64, n_routed_experts=128,
    num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
    routed_scaling_factor=2.5,
)  # fmt: skip


def omni() -> dict[str, Any]:
    """Nemotron 3 Nano Omni: RADIO-H before that decoder."""
    return {
        "model_type": "nemotron_h_omni", "text_config": NANO_30B, "projector_hidden_size": 20480,
        "image_token_id": 18, "dtype": "bfloat16",
        "vision_config": {
            "model_type": "radio", "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16
        },
    }  # fmt: skip


def nano_vl() -> dict[str, Any]:
    """Nemotron Nano 12B v2 VL: RADIO-H before that decoder."""
    return {
        "model_type": "NemotronH_Nano_VL_V2", "llm_config": NANO_12B, "projector_hidden_size": 20480, "patch_size": 16,
        "ps_version": "v2", "force_image_size": 512, "vit_hidden_size": 1280, "torch_dtype": "bfloat16",
        "vision_config": {
            "args": {
                "model": "vit_huge_patch16_224", "cls_token_per_teacher": True, "register_multiple": 10,
                "cpe_max_size": 2048, "teachers": [{"name": name} for name in ("clip", "siglip", "dino_v2")],
            },
            "patch_size": 16,
        },
    }  # fmt: skip


def zamba(layers: int, hidden: int, hybrid: list[int], groups: int, state: int, **others: bool | int) -> dict[str, Any]:
    """Zamba2, by the numbers of its hybrid layers."""
    return {
        "model_type": "zamba2", "vocab_size": 32000, "hidden_size": hidden, "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "gelu",
        "layers_block_type": ["hybrid" if index in hybrid else "mamba" for index in range(layers)],
        "mamba_d_state": state, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": groups,
        "n_mamba_heads": 2 * hidden // 64, "chunk_size": 256, "add_bias_linear": False, "adapter_rank": 128,
        "use_conv_bias": True, "use_long_context": False, "time_step_min": 0.001, "time_step_max": 0.1,
        "time_step_floor": 0.0001, "time_step_limit": None, "rope_theta": 10000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096, "dtype": "bfloat16", "eos_token_id": 2, **others,
    }  # fmt: skip


def zamba_small() -> dict[str, Any]:
    """Zamba2-1.2B: one block, with adapters of queries, keys and values too."""
    every_sixth = list(range(5, 38, 6))
    return zamba(38, 2048, every_sixth, 1, 128, num_mem_blocks=1, use_mem_rope=True, use_shared_attention_adapter=True)


def zamba_medium() -> dict[str, Any]:
    """Zamba2-2.7B: two blocks, without positions."""
    hybrid = [6, 12, 18, 24, 30, 36, 42, 47, 51]
    return zamba(54, 2560, hybrid, 1, 64, num_mem_blocks=2, use_mem_rope=False, use_shared_attention_adapter=False)


def zamba_large() -> dict[str, Any]:
    """Zamba2-7B."""
    hybrid = [6, *range(11, 81, 6)]
    return zamba(81, 3584, hybrid, 2, 64, num_mem_blocks=2, use_mem_rope=True, use_shared_attention_adapter=False)


def models() -> dict[str, dict[str, Any]]:
    """By the name used in docs/models.md."""
    qwen = {f"Qwen3.5-{name}": published(name) for name in PUBLISHED}
    others = {
        "Nemotron-Nano-12B-v2-VL": nano_vl(),
        "Nemotron-Nano-9B-v2": NANO_9B,
        "Nemotron-3-Nano-30B-A3B": NANO_30B,
        "Bamba-9B": bamba(),
    }
    others |= {"Falcon-H1-0.5B": falcon(), "Olmo-Hybrid-7B": olmo(), "Qwen3-Next-80B-A3B": qwen_next()}
    others |= {"Zamba2-1.2B": zamba_small(), "Zamba2-2.7B": zamba_medium(), "Zamba2-7B": zamba_large()}
    others["LFM2-350M"], others["LFM2-700M"] = lfm2(1024, 16, 6656), lfm2(1536, 24, 10240)
    others["LFM2-1.2B"], others["LFM2-8B-A1B"] = lfm2(2048, 32, 12288), lfm2_moe()
    others["LFM3-1.7B"], others["LFM3-VL-2B"] = lfm3(), lfm3_vl()
    others["LFM2-VL-450M"] = lfm2_vl(others["LFM2-350M"], **BASE)
    others["LFM2-VL-1.6B"] = lfm2_vl(others["LFM2-1.2B"], **SO400M)
    return {**qwen, "MiniCPM-V-4.6": minicpm(), "Nemotron-3-Nano-Omni-30B-A3B": omni(), **others}


HUB_IDS = {
    **{f"Qwen3.5-{name}": f"Qwen/Qwen3.5-{name}" for name in PUBLISHED},
    "MiniCPM-V-4.6": "openbmb/MiniCPM-V-4.6",
    "Nemotron-Nano-12B-v2-VL": "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16",
    "Nemotron-Nano-9B-v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "Nemotron-3-Nano-30B-A3B": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Bamba-9B": "ibm-ai-platform/Bamba-9B",
    "Falcon-H1-0.5B": "tiiuae/Falcon-H1-0.5B-Instruct",
    "Olmo-Hybrid-7B": "allenai/Olmo-Hybrid-7B",
    **{f"LFM2-{name}": f"LiquidAI/LFM2-{name}" for name in ("350M", "700M", "1.2B", "8B-A1B")},
    **{name: f"LiquidAI/{name}" for name in ("LFM3-1.7B", "LFM3-VL-2B")},
    **{f"LFM2-VL-{name}": f"LiquidAI/LFM2-VL-{name}" for name in ("450M", "1.6B")},
    "Qwen3-Next-80B-A3B": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    **{f"Zamba2-{name}": f"Zyphra/Zamba2-{name}" for name in ("1.2B", "2.7B", "7B")},
}
"""Their names on the Hugging Face hub, if known."""
