"""Writes GGUF files as llama.cpp's converter does, from the modules of transformers' models.

What the converter does to names, shapes and numbers is written down here once more, from reading its sources
(`conversion/*.py`), and not taken from the families' way back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from torch import Tensor

ALWAYS_F32 = ("ssm_conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight",
              "v.position_embd.weight", "v.patch_embd.weight", "_norm.weight")  # fmt: skip
KINDS = {"normal": 1, "control": 3, "added": 4, "unused": 5}


def kind_of(value: Any) -> Value:
    if isinstance(value, bool):
        return Value.BOOL
    if isinstance(value, str):
        return Value.STRING
    return Value.FLOAT32 if isinstance(value, float) else Value.UINT32


def write(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: Type = Type.BF16,
    types: Mapping[str, Type] | None = None,
) -> Path:  # fmt: skip
    """`metadata`: keys without the architecture, unless they begin with `general.`, `tokenizer.` or `split.`. `kind`:
    the type of matrices; one whose rows are no whole blocks becomes F16. `types`: beginning of a name -> the type of
    the matrices with such names."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        key = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{name}"
        if isinstance(value, list):
            inner = Value.INT32 if all(type(entry) is int for entry in value) else None
            writer.add_key_value(key, value, Value.ARRAY, inner)
        else:
            writer.add_key_value(key, value, kind_of(value))
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor.detach().float().numpy())
        wanted = next((each for start, each in (types or {}).items() if name.startswith(start)), kind)
        of = wanted if data.ndim > 1 and not name.endswith(ALWAYS_F32) and "weight" in name else Type.F32
        if data.shape[-1] % gguf.GGML_QUANT_SIZES[of][0]:
            of = Type.F16
        writer.add_tensor(name, encoded(data, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encoded(data: np.ndarray[Any, Any], kind: Type) -> np.ndarray[Any, Any]:
    """Numbers in a type; random numbers in types that the package does not write."""
    try:
        found: np.ndarray[Any, Any] = gguf.quants.quantize(data, kind)
    except NotImplementedError:
        return random_blocks(data.shape, kind)
    return found


def random_blocks(shape: Sequence[int], kind: Type) -> np.ndarray[Any, Any]:
    """uint8 `[..., bytes of a row]` of random finite numbers."""
    block, octets = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, octets), dtype=np.uint8)
    for place in range(1, octets, 2):  # no scale in float16 is infinite or NaN, wherever it is in the block
        data[..., place] &= 0xBF
    if kind is Type.MXFP4:
        data[..., 0] = np.minimum(data[..., 0], 240)  # above it, numbers are too large for float32
    return data.reshape(*shape[:-1], -1)


def vocabulary(count: int, special: Sequence[str] = ("<|endoftext|>",), pre: str = "qwen2") -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with `count` ids: printable characters, special tokens, ids without tokens."""
    tokens = [chr(33 + index) for index in range(min(94, count - len(special) - 2))] + ["in", *special]
    kinds = [KINDS["normal"]] * (len(tokens) - len(special)) + [KINDS["control"]] * len(special)
    for index in range(len(tokens), count):
        tokens.append(f"[PAD{index}]")
        kinds.append(KINDS["unused"])
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": ["i n"],
        "tokenizer.ggml.eos_token_id": tokens.index(special[0]), "tokenizer.ggml.add_bos_token": False,
    }  # fmt: skip


# -- what the converter does to numbers and shapes --------------------------------------------------------------------


def alternating_halves(weight: Tensor, heads: int) -> Tensor:
    """`LlamaModel.permute`."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tiled(weight: Tensor, dim: int, keys: int, each: int, width: int) -> Tensor:
    """`_reorder_v_heads`."""
    shape = list(weight.shape)
    split = weight.reshape(*shape[:dim], keys, each, width, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).contiguous().reshape(shape)


Change = Callable[[Tensor], Tensor]
MAMBA: dict[str, tuple[str, Change | None]] = {
    "in_proj.weight": ("ssm_in.weight", None),
    "in_proj.bias": ("ssm_in.bias", None),
    "conv1d.weight": ("ssm_conv1d.weight", lambda w: w.squeeze(1)),
    "conv1d.bias": ("ssm_conv1d.bias", None),
    "dt_bias": ("ssm_dt.bias", None),
    "A_log": ("ssm_a", lambda w: -torch.exp(w).reshape(-1, 1)),
    "D": ("ssm_d", lambda w: w.reshape(-1, 1)),
    "out_proj.weight": ("ssm_out.weight", None),
    "out_proj.bias": ("ssm_out.bias", None),
}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        if name.startswith(ours + ".") or name == ours:
            return theirs + name.removeprefix(ours)
    raise KeyError(name)


def _layer(name: str, prefix: str) -> tuple[str, str]:
    """(`blk.3.`, the name in the layer)."""
    index, _, part = name.removeprefix(prefix).partition(".")
    return f"blk.{index}.", part


def _both(name: str, tensor: Tensor, gate: str, up: str) -> Iterator[tuple[str, Tensor]]:
    first, second = tensor.chunk(2, -2)
    yield gate, first
    yield up, second


# -- qwen35, qwen35moe, qwen3next -------------------------------------------------------------------------------------

QWEN_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
MTP = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}  # fmt: skip


def qwen_tensors(weights: Mapping[str, Tensor], config: Any, *, reordered: bool = True) -> dict[str, Tensor]:
    """`weights`: by transformers' names of a text-only model. `reordered`: whether value heads are, as in all but
    qwen3next."""
    return dict(_qwen(weights, config, reordered))


def _qwen(weights: Mapping[str, Tensor], config: Any, reordered: bool) -> Iterator[tuple[str, Tensor]]:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    each, key, value = values // keys, config.linear_key_head_dim, config.linear_value_head_dim
    layers = config.num_hidden_layers

    def reorder(part: str, w: Tensor) -> Tensor:
        if part == "linear_attn.in_proj_qkv.weight" or part == "linear_attn.conv1d.weight":
            first = 2 * keys * key
            return torch.cat((w[:first], tiled(w[first:], 0, keys, each, value)))
        if part == "linear_attn.in_proj_z.weight":
            return tiled(w, 0, keys, each, value)
        if part in ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"):
            return tiled(w, 0, keys, each, 1)
        if part in ("linear_attn.A_log", "linear_attn.dt_bias"):
            return tiled(w[:, None], 0, keys, each, 1)[:, 0]
        if part == "linear_attn.out_proj.weight":
            return tiled(w, 1, keys, each, value)
        return w

    for name, w in weights.items():
        if name == "lm_head.weight":
            yield "output.weight", w
            continue
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", w
            continue
        norm = name.endswith("norm.weight") or "pre_fc_norm" in name
        if norm and "linear_attn" not in name:
            w = w.float() + 1
        if name == "model.norm.weight":
            yield "output_norm.weight", w
            continue
        if name.startswith("mtp.") and ".layers." not in name:
            yield f"blk.{layers}.{_renamed(name, MTP)}", w
            continue
        if name.startswith("mtp."):
            block, part = f"blk.{layers}.", name.removeprefix("mtp.layers.0.")
        else:
            block, part = _layer(name, "model.layers.")
        if part.endswith("in_proj_qkvz.weight"):
            rows = w.reshape(keys, 2 * key + 2 * each * value, -1)
            q, k, v, z = rows.split([key, key, each * value, each * value], 1)
            yield f"{block}attn_qkv.weight", torch.cat([x.flatten(0, 1) for x in (q, k, v)])
            yield f"{block}attn_gate.weight", z.flatten(0, 1)
            continue
        if part.endswith("experts.gate_up_proj"):
            yield from _both(part, w, f"{block}ffn_gate_exps.weight", f"{block}ffn_up_exps.weight")
            continue
        w = w.squeeze(1) if part == "linear_attn.conv1d.weight" else w
        w = reorder(part, w) if reordered else w
        w = -torch.exp(w.float()) if part.endswith("A_log") else w
        yield block + _renamed(part, QWEN_LAYER), w


def qwen_metadata(config: Any, heads: int = 0) -> dict[str, Any]:
    rope, moe = config.rope_parameters, getattr(config, "num_experts", 0)
    found = {
        "block_count": config.num_hidden_layers + heads, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "rope.freq_base": float(rope["rope_theta"]),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types] + [False] * heads,
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 0.25)),
        "full_attention_interval": 4,
    }  # fmt: skip
    if "mrope_section" in rope:
        found["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if (inner := getattr(config, "intermediate_size", None)) is not None:
        found["feed_forward_length"] = inner
    if heads:
        found["nextn_predict_layers"] = heads
    if moe:
        found |= {
            "expert_count": moe, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }  # fmt: skip
    return found


TOWER_LAYER = {"norm1": "ln1", "norm2": "ln2", "attn.qkv": "attn_qkv", "attn.proj": "attn_out",
               "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}  # fmt: skip
TOWER = {"pos_embed": "v.position_embd", "merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0",
         "merger.linear_fc2": "mm.2", "patch_embed.proj": "v.patch_embd"}  # fmt: skip


def qwen_tower(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights`: by transformers' names, after `visual.`."""
    found = {}
    for name, w in weights.items():
        if name == "patch_embed.proj.weight":
            found["v.patch_embd.weight"], found["v.patch_embd.weight.1"] = w[:, :, 0], w[:, :, 1]
        elif name.startswith("blocks."):
            block, part = _layer(name, "blocks.")
            found[f"v.{block}{_renamed(part, TOWER_LAYER)}"] = w
        else:
            found[_renamed(name, TOWER)] = w
    return found


def qwen_tower_metadata(vision: Any, text_hidden: int) -> dict[str, Any]:
    return {
        "general.type": "mmproj", "has_vision_encoder": True, "projector_type": "qwen3vl_merger",
        "vision.projection_dim": text_hidden, "vision.patch_size": vision.patch_size,
        "vision.image_size": vision.patch_size * 7, "vision.embedding_length": vision.hidden_size,
        "vision.feed_forward_length": vision.intermediate_size, "vision.block_count": vision.depth,
        "vision.attention.head_count": vision.num_heads, "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5], "use_gelu": True, "vision.spatial_merge_size": vision.spatial_merge_size,
        "vision.attention.layer_norm_epsilon": 1e-6, "vision.is_deepstack_layers": [False] * vision.depth,
    }  # fmt: skip


# -- lfm2, lfm2moe and its tower --------------------------------------------------------------------------------------

LFM_LAYER = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias", "feed_forward.experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip
LFM = {"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "lm_head": "output"}


def lfm_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, w in weights.items():
        if not name.startswith("model.layers."):
            found[_renamed(name, LFM)] = w
            continue
        block, part = _layer(name, "model.layers.")
        if part.endswith("experts.gate_up_proj"):
            found |= dict(_both(part, w, f"{block}ffn_gate_exps.weight", f"{block}ffn_up_exps.weight"))
        else:
            found[block + _renamed(part, LFM_LAYER)] = w.squeeze(1) if part == "conv.conv.weight" else w
    return found


def lfm_metadata(config: Any) -> dict[str, Any]:
    attention = [kind == "full_attention" for kind in config.layer_types]
    found = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * found for found in attention],
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": config.norm_eps, "vocab_size": config.vocab_size,
        "shortconv.l_cache": config.conv_L_cache,
    }  # fmt: skip
    if hasattr(config, "num_experts"):
        found |= {
            "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size, "expert_gating_func": 2,
            "leading_dense_block_count": config.num_dense_layers,
        }  # fmt: skip
    return found


SIGLIP_LAYER = {
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
}  # fmt: skip
SIGLIP = {
    "vision_tower.embeddings.position_embedding": "v.position_embd", "vision_tower.post_layernorm": "v.post_ln",
    "vision_tower.embeddings.patch_embedding": "v.patch_embd", "multi_modal_projector.layer_norm": "mm.input_norm",
    "multi_modal_projector.linear_1": "mm.1", "multi_modal_projector.linear_2": "mm.2",
}  # fmt: skip


def lfm_tower(weights: Mapping[str, Tensor], patch: int) -> dict[str, Tensor]:
    """`weights`: by transformers' names, after `model.`, without the pooling head."""
    found: dict[str, Tensor] = {}
    for name, w in weights.items():
        if name.startswith("vision_tower.encoder.layers."):
            block, part = _layer(name, "vision_tower.encoder.layers.")
            found[f"v.{block}{_renamed(part, SIGLIP_LAYER)}"] = w
        else:
            if name.endswith("patch_embedding.weight"):
                w = w.view(w.shape[0], patch, patch, 3).permute(0, 3, 1, 2)
            found[_renamed(name, SIGLIP)] = w
    return found


def lfm_tower_metadata(config: Any, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    vision = config.vision_config
    return {
        "general.type": "mmproj", "has_vision_encoder": True, "projector_type": "lfm2",
        "vision.projection_dim": config.text_config.hidden_size, "vision.image_size": 256,
        "vision.patch_size": vision.patch_size, "vision.embedding_length": vision.hidden_size,
        "vision.feed_forward_length": vision.intermediate_size, "vision.block_count": vision.num_hidden_layers,
        "vision.attention.head_count": vision.num_attention_heads, "vision.image_mean": list(mean),
        "vision.image_std": list(std), "vision.attention.layer_norm_epsilon": vision.layer_norm_eps,
        "vision.projector.scale_factor": config.downsample_factor, "use_gelu": True,
    }  # fmt: skip


# -- nemotron_h, nemotron_h_moe ---------------------------------------------------------------------------------------

NEMOTRON_LAYER = {
    "norm": "attn_norm", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias", "mixer.gate": "ffn_gate_inp",
    "mixer.experts.up_proj": "ffn_up_exps.weight", "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip
NEMOTRON = {"model.embeddings": "token_embd", "model.norm_f": "output_norm", "lm_head": "output"}


def nemotron_tensors(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, w in weights.items():
        if not name.startswith("model.layers."):
            found[_renamed(name, NEMOTRON)] = w
            continue
        block, part = _layer(name, "model.layers.")
        inner = part.removeprefix("mixer.")
        if inner in MAMBA:
            theirs, change = MAMBA[inner]
            found[block + theirs] = w if change is None else change(w)
        elif part == "mixer.norm.weight":
            found[f"{block}ssm_norm.weight"] = w.reshape(config.n_groups, -1)
        else:
            for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
                if inner.startswith(f"{letter}_proj."):
                    w = alternating_halves(w, heads)
            found[block + _renamed(part, NEMOTRON_LAYER)] = w
    return found


def nemotron_metadata(config: Any) -> dict[str, Any]:
    kinds = list(config.layers_block_type)
    moe = "moe" in kinds
    widths = {"moe": config.moe_intermediate_size} if moe else {"mlp": config.intermediate_size}
    found = {
        "block_count": len(kinds), "context_length": config.max_position_embeddings, "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size, "feed_forward_length": [widths.get(kind, 0) for kind in kinds],
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * ("attention" in kind and "full" in kind)
                                    for kind in kinds],
        "attention.layer_norm_epsilon": config.layer_norm_epsilon, "attention.key_length": config.head_dim,
        "ssm.conv_kernel": config.conv_kernel, "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups, "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim, "rope.scaling.finetuned": False,
    }  # fmt: skip
    if moe:
        found |= {
            "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": 1, "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group, "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
        }  # fmt: skip
        if config.moe_latent_size:
            found["moe_latent_size"] = config.moe_latent_size
    return found


# -- granitehybrid, falcon-h1 -----------------------------------------------------------------------------------------

GRANITE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
GRANITE_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
}  # fmt: skip


def granite_tensors(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    end = "_shexp" if config.num_local_experts else ""
    for name, w in weights.items():
        if not name.startswith("model.layers."):
            found[_renamed(name, GRANITE)] = w
            continue
        block, part = _layer(name, "model.layers.")
        inner = part.removeprefix("mamba.")
        if part.startswith("mamba.") and inner in MAMBA:
            theirs, change = MAMBA[inner]
            found[block + theirs] = w if change is None else change(w)
        elif part == "mamba.norm.weight":
            found[f"{block}ssm_norm.weight"] = w.reshape(config.mamba_n_groups, -1)
        elif part == "shared_mlp.input_linear.weight":
            found |= dict(_both(part, w, f"{block}ffn_gate{end}.weight", f"{block}ffn_up{end}.weight"))
        elif part == "shared_mlp.output_linear.weight":
            found[f"{block}ffn_down{end}.weight"] = w
        elif part in ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"):
            found |= dict(_both(part, w, f"{block}ffn_gate_exps.weight", f"{block}ffn_up_exps.weight"))
        elif part in ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"):
            found[f"{block}ffn_down_exps.weight"] = w
        elif part in ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"):
            found[f"{block}ffn_gate_inp.weight"] = w
        else:
            for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
                if part.startswith(f"self_attn.{letter}_proj."):
                    w = alternating_halves(w, heads)
            found[block + _renamed(part, GRANITE_LAYER)] = w
    return found


def granite_metadata(config: Any) -> dict[str, Any]:
    found = {
        "block_count": config.num_hidden_layers, "context_length": 2**20, "vocab_size": config.vocab_size,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * ("full" in kind or kind == "attention")
                                    for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.scaling.finetuned": False,
        "attention.scale": float(config.attention_multiplier), "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier), "logit_scale": float(config.logits_scaling),
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        **_mamba_metadata(config, config.mamba_expand * config.hidden_size),
    }  # fmt: skip
    if config.num_local_experts:
        found |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    return found


def _mamba_metadata(config: Any, inner: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv, "ssm.state_size": config.mamba_d_state, "ssm.inner_size": inner,
        "ssm.group_count": config.mamba_n_groups, "ssm.time_step_rank": config.mamba_n_heads,
    }  # fmt: skip


FALCON_LAYER = {
    "input_layernorm": "attn_norm", "pre_ff_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up", "feed_forward.down_proj": "ffn_down",
}  # fmt: skip
FALCON = {"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"}


def falcon_tensors(weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """With all constants of the model multiplied into matrices; biases, which released models do not have, are left."""
    found: dict[str, Tensor] = {}
    inner = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
    bc = config.mamba_n_groups * config.mamba_d_state
    ssm = config.ssm_multipliers or [1.0] * 5
    gate, down = config.mlp_multipliers or [1.0] * 2
    parts = torch.tensor(ssm).repeat_interleave(torch.tensor([inner, inner, bc, bc, config.mamba_n_heads]))
    factors: dict[str, Any] = {
        "feed_forward.down_proj": down, "feed_forward.gate_proj": gate,
        "self_attn.k_proj": config.key_multiplier * config.attention_in_multiplier,
        "self_attn.q_proj": config.attention_in_multiplier, "self_attn.v_proj": config.attention_in_multiplier,
        "self_attn.o_proj": config.attention_out_multiplier, "mamba.out_proj": config.ssm_out_multiplier,
        "mamba.in_proj": config.ssm_in_multiplier * parts[:, None], "lm_head": config.lm_head_multiplier,
        "model.embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    for name, w in weights.items():
        block, part = _layer(name, "model.layers.") if name.startswith("model.layers.") else ("", name)
        w = w * factors.get(part.removesuffix(".weight"), 1.0)
        inner_name = part.removeprefix("mamba.")
        if not block:
            found[_renamed(name, FALCON)] = w
        elif part.startswith("mamba.") and inner_name in MAMBA:
            theirs, change = MAMBA[inner_name]
            found[block + theirs] = w if change is None else change(w)
        elif part == "mamba.norm.weight":
            found[f"{block}ssm_norm.weight"] = w.reshape(config.mamba_n_groups, -1)
        else:
            found[block + _renamed(part, FALCON_LAYER)] = w
    return found


def falcon_metadata(config: Any) -> dict[str, Any]:
    inner = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
    return {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "vocab_size": config.vocab_size,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]), **_mamba_metadata(config, inner),
    }  # fmt: skip


# -- hostile files ----------------------------------------------------------------------------------------------------


def raw(pairs: Sequence[bytes], infos: Sequence[bytes] = (), data: bytes = b"", *, version: int = 3) -> bytes:
    """A file of parts."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return head + b"\0" * (-len(head) % 32) + data


def string(text: bytes | str, claimed: int | None = None) -> bytes:
    octets = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(octets) if claimed is None else claimed) + octets


def pair(key: str, kind: Value, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def info(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
