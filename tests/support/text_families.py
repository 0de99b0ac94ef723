"""Random tiny checkpoints of text-only families, written by transformers, which is the oracle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from qwen_checkpoint import mtp_weights
from safetensors.torch import load_file, save_file
from tiny_checkpoint import VOCAB, TinyCheckpoint, randomise
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)


def _shared(rng: random.Random, layers: int) -> dict[str, Any]:
    """Configuration fields that Bamba, Falcon-H1 and Granite have."""
    kv = rng.choice([1, 2])
    heads = kv * rng.choice([1, 2, 4])
    mamba_heads, groups = rng.choice([(2, 1), (4, 1), (4, 2), (8, 2)])
    hidden = heads * rng.choice([8, 16])
    hidden = hidden if 2 * hidden % mamba_heads == 0 else hidden * mamba_heads
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": rng.choice([24, 40]),
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": "auto",
        "mamba_n_groups": groups,
        "mamba_d_state": rng.choice([4, 16]),
        "mamba_d_conv": rng.choice([2, 4, 5]),
        "mamba_chunk_size": rng.choice([8, 16]),
        "mamba_conv_bias": rng.random() < 0.8,
        "mamba_proj_bias": rng.random() < 0.3,
        "attention_bias": rng.random() < 0.3,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": rng.random() < 0.3,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
    }


def bamba(rng: random.Random) -> Any:
    layers = rng.randint(1, 4)
    attention = [index for index in range(layers) if rng.random() < 0.5]
    fields = {**_shared(rng, layers), "attn_layer_indices": attention, "mlp_bias": rng.random() < 0.3}
    if rng.random() < 0.5:
        share = rng.choice([0.25, 0.5, 1.0])
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    return BambaForCausalLM(BambaConfig(**fields))


def granite(rng: random.Random) -> Any:
    layers = rng.randint(1, 4)
    experts = rng.choice([0, 4, 6])
    config = GraniteMoeHybridConfig(
        **_shared(rng, layers),
        layer_types=[rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)],
        position_embedding_type=rng.choice([None, "rope"]),
        num_local_experts=experts,
        num_experts_per_tok=rng.choice([1, 2]) if experts else 0,
        shared_intermediate_size=rng.choice([24, 32]),
        embedding_multiplier=rng.choice([1.0, 12.0]),
        logits_scaling=rng.choice([1.0, 8.0]),
        residual_multiplier=rng.choice([1.0, 0.22]),
        attention_multiplier=rng.choice([0.125, 0.3]),
    )
    return GraniteMoeHybridForCausalLM(config)


def qwen_next(rng: random.Random) -> Any:
    layers, kv, experts = rng.randint(1, 4), rng.choice([1, 2]), rng.choice([0, 4, 6])
    key_heads = rng.choice([1, 2])
    config = Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=rng.choice([32, 48]),
        num_hidden_layers=layers,
        num_attention_heads=kv * rng.choice([1, 2, 4]),
        num_key_value_heads=kv,
        head_dim=rng.choice([16, 32]),
        intermediate_size=rng.choice([24, 40]),
        linear_conv_kernel_dim=rng.choice([2, 4]),
        linear_key_head_dim=rng.choice([8, 16]),
        linear_value_head_dim=rng.choice([8, 12, 16]),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * rng.choice([1, 2, 3]),
        layer_types=[rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)],
        num_experts=experts,
        num_experts_per_tok=rng.choice([1, 2]),
        moe_intermediate_size=rng.choice([8, 24]),
        shared_expert_intermediate_size=rng.choice([8, 24]),
        decoder_sparse_step=rng.choice([1, 1, 2]),
        mlp_only_layers=rng.choice([[], [0], [1, 2]]),
        attention_bias=rng.random() < 0.3,
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        tie_word_embeddings=rng.random() < 0.3,
        max_position_embeddings=512,
        eos_token_id=2,
        num_nextn_predict_layers=rng.choice([0, 1]),
    )
    return Qwen3NextForCausalLM(config)


def lfm2(rng: random.Random) -> Any:
    layers, kv = rng.randint(1, 4), rng.choice([1, 2])
    heads = kv * rng.choice([1, 2, 4])
    kinds = ["conv", rng.choice(["conv", "full_attention"])]  # many models without attention
    shared = {
        "vocab_size": VOCAB,
        "hidden_size": heads * rng.choice([8, 16]),
        "intermediate_size": rng.choice([24, 41]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 512,
        "norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": rng.choice([None, {"rope_type": "default", "rope_theta": 1e4}]),
        "conv_bias": rng.random() < 0.3,
        "conv_L_cache": rng.choice([2, 3, 4, 5]),
        "layer_types": [rng.choice(kinds) for _ in range(layers)],
        "eos_token_id": [2, 7],
    }
    if rng.random() < 0.5:
        return Lfm2MoeForCausalLM(_lfm2_moe(rng, shared))
    config = Lfm2Config(
        block_multiple_of=rng.choice([4, 16]),
        block_ffn_dim_multiplier=rng.choice([1.0, 1.3]),
        block_auto_adjust_ff_dim=rng.random() < 0.7,
        **shared,
    )
    return Lfm2ForCausalLM(config)


def _lfm2_moe(rng: random.Random, shared: dict[str, Any]) -> Lfm2MoeConfig:
    """With the first layers dense, all or none of them."""
    return Lfm2MoeConfig(
        num_dense_layers=rng.choice([0, 1, 2]),
        num_experts=rng.choice([4, 6]),
        num_experts_per_tok=rng.choice([1, 2]),
        moe_intermediate_size=rng.choice([8, 24]),
        use_expert_bias=rng.random() < 0.7,
        norm_topk_prob=rng.random() < 0.7,
        routed_scaling_factor=rng.choice([1.0, 2.5]),
        **shared,
    )


def lfm3(rng: random.Random) -> Any:
    layers, kv = rng.randint(1, 4), rng.choice([1, 2])
    heads = kv * rng.choice([1, 2, 4])
    kinds = ["conv", "sliding_attention", "full_attention"]
    share = rng.choice([0.25, 0.5, 1.0])
    proportional = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share}
    config = Lfm3Config(
        vocab_size=VOCAB,
        hidden_size=heads * rng.choice([8, 16]),
        intermediate_size=rng.choice([24, 40]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=rng.choice([8, 16]),
        max_position_embeddings=512,
        norm_eps=rng.choice([1e-5, 1e-6]),
        tie_word_embeddings=rng.random() < 0.5,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": rng.choice([proportional, {"rope_type": "default", "rope_theta": 1e5}]),
        },
        conv_bias=rng.random() < 0.3,
        conv_L_cache=rng.choice([3, 7, 7, 8]),
        layer_types=rng.choice([None, [rng.choice(kinds) for _ in range(layers)]]),
        sliding_window=rng.choice([1, 5, 16, 256]),
        use_sandwich_norm=rng.random() < 0.8,
        use_attention_gate=rng.random() < 0.8,
        attention_bias=rng.random() < 0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=[2, 7],
    )
    return Lfm3ForCausalLM(config)


def falcon(rng: random.Random) -> Any:
    """With multipliers, of which each is 1 in some models."""
    shared = _shared(rng, rng.randint(1, 3))

    def factors(count: int) -> list[float]:
        return [rng.choice([1.0, 0.35, 0.8, 1.25, 1.7]) for _ in range(count)]

    names = ["embedding", "lm_head", "ssm_in", "ssm_out", "attention_in", "attention_out", "key"]
    config = FalconH1Config(
        **shared,
        **{f"{name}_multiplier": factor for name, factor in zip(names, factors(7), strict=True)},
        ssm_multipliers=rng.choice([None, factors(5)]),
        mlp_multipliers=rng.choice([None, factors(2)]),
        mamba_d_ssm=rng.choice([None, 24, 40]),
        mamba_rms_norm=rng.random() < 0.5,
        mamba_norm_before_gate=rng.random() < 0.5,
        projectors_bias=rng.random() < 0.3,
        mlp_bias=rng.random() < 0.3,
        time_step_limit=rng.choice([(0.0, float("inf")), (0.05, 0.2)]),
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([1e4, 1e11])},
        head_dim=rng.choice([8, 12, 16]),
    )
    return FalconH1ForCausalLM(config)


def olmo(rng: random.Random) -> Any:
    kinds = ["linear_attention", "full_attention"]  # transformers wants both
    kinds += [rng.choice(kinds) for _ in range(rng.randint(0, 2))]
    rng.shuffle(kinds)
    kv, key_heads = rng.choice([1, 2, 4]), rng.choice([1, 2])
    heads = kv * rng.choice([1, 2])
    config = OlmoHybridConfig(
        vocab_size=VOCAB,
        hidden_size=heads * rng.choice([8, 12]),
        intermediate_size=rng.choice([24, 40]),
        num_hidden_layers=len(kinds),
        num_attention_heads=heads,
        num_key_value_heads=kv,
        layer_types=kinds,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * rng.choice([1, 2, 3]),
        linear_key_head_dim=rng.choice([6, 8, 16]),
        linear_value_head_dim=rng.choice([8, 12, 16]),
        linear_conv_kernel_dim=rng.choice([2, 4]),
        linear_allow_neg_eigval=rng.random() < 0.7,
        rope_parameters={"rope_type": "default", "rope_theta": rng.choice([None, None, 1e4])},
        attention_bias=rng.random() < 0.3,
        rms_norm_eps=rng.choice([1e-5, 1e-6]),
        tie_word_embeddings=rng.random() < 0.3,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=2,
    )
    return OlmoHybridForCausalLM(config)


def _released_olmo(model: OlmoHybridForCausalLM) -> dict[str, torch.Tensor]:
    """The weights as released: norms before gated delta layers have other names, and queries, keys and values have
    their own convolutions. transformers writes three equal parts and renames norms of attention layers too."""
    config, found = model.config, {}
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    sizes = [keys, keys, config.linear_num_value_heads * config.linear_value_head_dim]
    for name, tensor in model.state_dict().items():
        index = int(name.split(".")[2]) if ".layers." in name else 0
        if ".conv1d." in name:
            parts = zip("qkv", tensor.split(sizes), strict=True)
            found |= {name.replace("conv1d", f"{letter}_conv1d"): part.contiguous() for letter, part in parts}
            continue
        if ".layers." in name and config.layer_types[index] == "linear_attention":
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            found[name] = tensor
    return found


def zamba(rng: random.Random) -> Any:
    """With shared blocks that one or several layers use, and models without any. The time steps of prompts have no
    lower limit that matters, like those of single tokens in transformers."""
    layers, adapters, groups = rng.randint(1, 6), rng.random() < 0.5, rng.choice([1, 2])
    kv = rng.choice([1, 2])
    heads = kv if adapters else kv * rng.choice([1, 2])
    hidden = heads * rng.choice([8, 12])
    config = Zamba2Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        layers_block_type=[rng.choice(["linear_attention", "hybrid", "hybrid"]) for _ in range(layers)],
        mamba_d_state=rng.choice([4, 16]),
        mamba_d_conv=rng.choice([2, 4, 5]),
        mamba_ngroups=groups,
        n_mamba_heads=groups * rng.choice([1, 2]),
        chunk_size=rng.choice([8, 16]),
        add_bias_linear=rng.random() < 0.3,
        intermediate_size=rng.choice([24, 40]),
        hidden_act=rng.choice(["gelu", "gelu", "silu"]),
        num_attention_heads=heads,
        num_key_value_heads=kv,
        num_mem_blocks=rng.choice([1, 2]),
        use_shared_attention_adapter=adapters,
        adapter_rank=rng.choice([4, 6]),
        use_mem_rope=rng.random() < 0.5,
        time_step_min=1e-9,
        time_step_floor=1e-9,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    return Zamba2ForCausalLM(config)


FAMILIES = {
    "bamba": bamba, "granitemoehybrid": granite, "qwen3_next": qwen_next, "lfm2": lfm2, "lfm3": lfm3,
    "falcon_h1": falcon, "olmo_hybrid": olmo, "zamba2": zamba,
}  # fmt: skip


def make_text_checkpoint(path: Path, family: str, seed: int) -> TinyCheckpoint:
    """Writes a random tiny model of the family."""
    torch.manual_seed(seed)
    model = FAMILIES[family](random.Random(seed)).float().eval()
    randomise(model, seed)
    model.save_pretrained(path)
    if family == "olmo_hybrid" and seed % 2:
        save_file(_released_olmo(model), path / "model.safetensors", metadata={"format": "pt"})
    if getattr(model.config, "num_nextn_predict_layers", 0):
        file, experts = path / "model.safetensors", model.config.num_experts > 0
        head = mtp_weights(model, seed, moe=experts, one_by_one=True)
        save_file({**load_file(file), **head}, file, metadata={"format": "pt"})
    return TinyCheckpoint(path, model, False)
