"""Random tiny Qwen3.5 checkpoints, written by transformers (the oracle), under any of the names that files use."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_checkpoint import VOCAB, TinyCheckpoint, randomise
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

NAMINGS = ("model.language_model.", "model.", "language_model.model.", "language_model.")
"""Prefixes of `layers.0`."""
IDS = {"image_token_id": 96, "video_token_id": 95, "vision_start_token_id": 94, "vision_end_token_id": 93}


def random_text(rng: random.Random, *, moe: bool, **fixed: Any) -> dict[str, Any]:
    """Fields of a text configuration of a random shape."""
    layers = rng.randint(1, 4)
    kv, key_heads = rng.choice([1, 2]), rng.choice([1, 2])
    width, share, sections = rng.choice([(32, 0.25, [2, 1, 1]), (16, 0.5, [2, 1, 1]), (16, 1.0, [3, 3, 2])])
    experts = {
        "num_experts": rng.choice([4, 6]), "num_experts_per_tok": rng.choice([1, 2, 4]),
        "moe_intermediate_size": rng.choice([8, 24]), "shared_expert_intermediate_size": rng.choice([8, 24]),
    }  # fmt: skip
    return {
        "vocab_size": VOCAB,
        "hidden_size": rng.choice([32, 64]),
        "num_hidden_layers": layers,
        "num_attention_heads": kv * rng.choice([1, 2, 4]),
        "num_key_value_heads": kv,
        "head_dim": width,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([8, 16]),
        "linear_value_head_dim": rng.choice([8, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "layer_types": [rng.choice(["linear_attention", "full_attention"]) for _ in range(layers)],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": rng.choice([1e4, 1e7]), "partial_rotary_factor": share,
            "mrope_section": sections, "mrope_interleaved": True,
        },
        "attention_bias": rng.random() < 0.2,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        **(experts if moe else {"intermediate_size": rng.choice([24, 40])}),
        **fixed,
    }  # fmt: skip


def make_qwen(
    path: Path, seed: int, *, moe: bool | None = None, tied: bool | None = None, naming: str | None = None,
    mtp: bool = False, one_by_one: bool | None = None, vision: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None, ids: dict[str, int] = IDS,
) -> TinyCheckpoint:  # fmt: skip
    """Writes a random tiny model; arguments that are None are random.

    `vision`: fields of its tower, None for a text-only model. `naming`: one of `NAMINGS`. `mtp`: with a multi-token
    prediction head. `one_by_one`: experts as separate tensors. `ids`: of the special tokens for images and clips.
    """
    rng = random.Random(seed)
    moe = rng.random() < 0.5 if moe is None else moe
    tied = rng.random() < 0.5 if tied is None else tied
    naming = rng.choice(NAMINGS) if naming is None else naming
    one_by_one = rng.random() < 0.5 if one_by_one is None else one_by_one
    fields = random_text(rng, moe=moe, **(text or {}), mtp_num_hidden_layers=int(mtp))
    torch.manual_seed(seed)
    model = _text_model(fields, moe, tied) if vision is None else _vision_model(fields, vision, moe, tied, ids)
    model = model.float().eval()
    randomise(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "visual" not in name and "linear_attn" not in name:
                parameter -= 1  # zero-centred
    if tied:
        model.tie_weights()
    weights = _named(model, naming, one_by_one)
    if mtp:
        weights |= mtp_weights(model, seed, moe, one_by_one)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    if vision is None and naming == "model.language_model.":
        whole = "qwen3_5_moe" if moe else "qwen3_5"
        config = {"model_type": whole, "text_config": config, "language_model_only": True}
        config |= {"tie_word_embeddings": config["text_config"].pop("tie_word_embeddings")}
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, default=str))
    return TinyCheckpoint(path, model, vision is not None)


def _text_model(fields: dict[str, Any], moe: bool, tied: bool) -> Any:
    made, config = (
        (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig) if moe else (Qwen3_5ForCausalLM, Qwen3_5TextConfig)
    )  # fmt: skip
    return made(config(**fields, tie_word_embeddings=tied))


def _vision_model(fields: dict[str, Any], vision: dict[str, Any], moe: bool, tied: bool, ids: dict[str, int]) -> Any:
    made, config = (
        (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig) if moe
        else (Qwen3_5ForConditionalGeneration, Qwen3_5Config)
    )  # fmt: skip
    vision = {"out_hidden_size": fields["hidden_size"], **vision}
    return made(config(text_config=fields, vision_config=vision, tie_word_embeddings=tied, **ids))


def _named(model: Any, naming: str, one_by_one: bool) -> dict[str, torch.Tensor]:
    """The model's tensors under the names used in files."""
    found: dict[str, torch.Tensor] = {}
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        if name.startswith(("model.language_model.", "model.visual.")):
            stored = name
        elif name == "lm_head.weight":
            stored = "language_model.lm_head.weight" if naming == "language_model.model." else name
        else:
            stored = naming + name.removeprefix("model.")
        found |= _experts(stored, tensor, one_by_one)
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


def _experts(name: str, tensor: torch.Tensor, one_by_one: bool) -> dict[str, torch.Tensor]:
    head, _, last = name.rpartition(".")
    if not one_by_one or not head.endswith(".experts"):
        return {name: tensor}
    parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1))) if last == "gate_up_proj" else {last: tensor}
    return {f"{head}.{e}.{part}.weight": of[e] for part, of in parts.items() for e in range(of.shape[0])}


def mtp_weights(model: Any, seed: int, moe: bool, one_by_one: bool) -> dict[str, torch.Tensor]:
    """Weights of a random prediction head, whose layer has the shapes of a full-attention layer."""
    config = model.config.get_text_config()
    layer = type(model)(one_layer(model.config)).state_dict()
    generator = torch.Generator().manual_seed(seed + 1)
    hidden = config.hidden_size
    shapes = {
        f"mtp.layers.0.{name.split('layers.0.')[1]}": tuple(tensor.shape)
        for name, tensor in layer.items() if "layers.0." in name and "visual" not in name
    }  # fmt: skip
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    found: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else shape[-1] ** -0.5
        found |= _experts(name, scale * torch.randn(shape, generator=generator), one_by_one)
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def one_layer(config: Any) -> Any:
    copy = type(config).from_dict(config.to_dict())
    text = copy.get_text_config()
    text.num_hidden_layers, text.layer_types, text.attention_bias = 1, ["full_attention"], False
    text.decoder_sparse_step, text.mlp_only_layers = 1, []
    return copy
