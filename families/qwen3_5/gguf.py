"""The family's models in GGUF files: llama.cpp's architectures `qwen35` and `qwen35moe`, and towers `qwen3vl_merger`.

Source: `conversion/qwen.py` and `conversion/qwen3vl.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from families.files import CheckpointError
from families.gguf_model import GgufModel, Layout, Made, linear, renamed
from families.gguf_weights import (
    MINUS_EXP,
    PLUS_ONE,
    Names,
    convolution,
    grouped,
    grouped_inputs,
    row,
    stacked_rows,
    vector,
)
from families.qwen_media import RELEASED_IMAGE, RELEASED_VIDEO, Resizing

TEMPORAL_PATCH = 2
"""Frames in a patch, for each of which the file has a tensor."""
_ATTENTION: Names = {
    "attn_norm.weight": ("input_layernorm.weight", PLUS_ONE, None),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", PLUS_ONE, None),
    "attn_q_norm.weight": ("self_attn.q_norm.weight", PLUS_ONE, None),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", PLUS_ONE, None),
    **linear("attn_q", "self_attn.q_proj"),
    **linear("attn_k", "self_attn.k_proj"),
    **linear("attn_v", "self_attn.v_proj"),
    **linear("attn_output", "self_attn.o_proj"),
}
_FEED_FORWARD: Names = {
    **linear("ffn_gate", "mlp.gate_proj"),
    **linear("ffn_up", "mlp.up_proj"),
    **linear("ffn_down", "mlp.down_proj"),
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", None, row),
    **linear("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    **linear("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    **linear("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
}
_HEAD: Names = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": ("pre_fc_norm_embedding.weight", PLUS_ONE, None),
    "nextn.hnorm.weight": ("pre_fc_norm_hidden.weight", PLUS_ONE, None),
    "nextn.shared_head_norm.weight": ("norm.weight", PLUS_ONE, None),
}


@dataclass(frozen=True)
class DeltaHeads:
    """Heads of the gated delta rule. Each key head has several value heads, which are published one key head after the
    other, and stored the first of each key head, then the second, and so on."""

    keys: int
    values: int
    key_width: int
    value_width: int

    @property
    def each(self) -> int:
        """Value heads of a key head."""
        return self.values // self.keys

    def made(self, layer: str, ours: str) -> Iterator[Made]:
        """The weights of one layer. `layer`, `ours`: what precedes names in the file, and published names."""
        values = partial(grouped, inner=self.each, outer=self.keys)
        wide, single = partial(values, width=self.value_width), partial(values, width=1)
        beyond = partial(wide, first=2 * self.keys * self.key_width)
        out = partial(grouped_inputs, inner=self.each, outer=self.keys, width=self.value_width)
        yield Made(f"{ours}in_proj_qkv.weight", (f"{layer}attn_qkv.weight",), beyond)
        yield Made(f"{ours}in_proj_z.weight", (f"{layer}attn_gate.weight",), wide)
        yield Made(f"{ours}in_proj_a.weight", (f"{layer}ssm_alpha.weight",), single)
        yield Made(f"{ours}in_proj_b.weight", (f"{layer}ssm_beta.weight",), single)
        yield Made(f"{ours}dt_bias", (f"{layer}ssm_dt.bias",), lambda stored: single(vector(stored)))
        yield Made(f"{ours}A_log", (f"{layer}ssm_a",), lambda stored: single(vector(stored)), MINUS_EXP)
        yield Made(
            f"{ours}conv1d.weight", (f"{layer}ssm_conv1d.weight",), lambda stored: convolution(beyond(stored))
        )  # fmt: skip
        yield Made(f"{ours}norm.weight", (f"{layer}ssm_norm.weight",), vector)
        yield Made(f"{ours}out_proj.weight", (f"{layer}ssm_out.weight",), out, moved=self.value_width)


def delta_heads(model: GgufModel) -> DeltaHeads:
    data = model.metadata
    keys, values = data.count("ssm.group_count"), data.count("ssm.time_step_rank")
    inner = data.count("ssm.inner_size")
    for few, many, what in ((keys, values, "group_count"), (values, inner, "time_step_rank")):
        if many % few:
            other = "time_step_rank" if many is values else "inner_size"
            raise CheckpointError(f"{data.file}: {data.key('ssm.' + what)} {few} does not divide ssm.{other} {many}")
    return DeltaHeads(keys, values, data.count("ssm.state_size"), inner // values)


def _kinds(model: GgufModel) -> list[str]:
    """The kind of each published layer."""
    data = model.metadata
    if "attention.recurrent_layers" in data:
        recurrent = data.listed("attention.recurrent_layers", bool, model.layers + model.heads)[: model.layers]
    else:
        interval = data.count("full_attention_interval", 4)
        recurrent = [bool((index + 1) % interval) for index in range(model.layers)]
    return ["linear_attention" if found else "full_attention" for found in recurrent]


def text_config(model: GgufModel, *, moe: bool) -> dict[str, Any]:
    """The fields of the decoder."""
    data, heads, width = model.metadata, delta_heads(model), model.metadata.count("attention.key_length", 256)
    data.only("attention.causal", True)
    data.only("rope.scaling.type", "none")
    sections = data.listed("rope.dimension_sections", int, default=[11, 11, 10, 0])
    feed_forward = (
        {
            "num_experts": data.count("expert_count"),
            "num_experts_per_tok": data.count("expert_used_count"),
            "moe_intermediate_size": data.count("expert_feed_forward_length"),
            "shared_expert_intermediate_size": data.count("expert_shared_feed_forward_length"),
        }
        if moe
        else {"intermediate_size": data.in_layers("feed_forward_length", model.layers + model.heads)}
    )
    return {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "vocab_size": model.vocab_size,
        "hidden_size": data.count("embedding_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": data.count("attention.head_count"),
        "num_key_value_heads": data.in_layers("attention.head_count_kv", model.layers + model.heads),
        "head_dim": width,
        "hidden_act": "silu",
        "attention_bias": model.has("attn_q.bias"),
        **feed_forward,
        "max_position_embeddings": data.count("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "layer_types": _kinds(model),
        "linear_conv_kernel_dim": data.count("ssm.conv_kernel"),
        "linear_key_head_dim": heads.key_width,
        "linear_value_head_dim": heads.value_width,
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "mtp_num_hidden_layers": model.heads,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": data.number("rope.freq_base", 10000.0),
            "partial_rotary_factor": data.count("rope.dimension_count", width // 4) / width,
            "mrope_section": sections[:3],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": model.tied,
    }


def decoder(
    model: GgufModel, prefix: str = "model.", delta: Callable[[DeltaHeads, str, str], Iterator[Made]] | None = None
) -> Iterator[Made]:
    """The decoder's weights. `prefix`: what precedes published names other than those of the projection to the
    vocabulary and of multi-token prediction. `delta`: the weights of a layer of the gated delta rule, given what
    precedes names in the file, and published names; None: those of this family."""
    heads, kinds = delta_heads(model), _kinds(model)
    delta = delta or DeltaHeads.made
    yield Made(f"{prefix}embed_tokens.weight", ("token_embd.weight",))
    yield Made(f"{prefix}norm.weight", ("output_norm.weight",), None, PLUS_ONE)
    yield Made("lm_head.weight", ("output.weight",))
    for index in range(model.layers + model.heads):
        theirs, head = f"blk.{index}.", index >= model.layers
        ours = f"mtp.layers.{index - model.layers}." if head else f"{prefix}layers.{index}."
        yield from renamed(model, theirs, ours, {**_ATTENTION, **_FEED_FORWARD})
        both = (f"{theirs}ffn_gate_exps.weight", f"{theirs}ffn_up_exps.weight")
        yield Made(f"{ours}mlp.experts.gate_up_proj", both, stacked_rows)
        if head:
            yield from renamed(model, theirs, "mtp.", _HEAD)
        elif kinds[index] == "linear_attention":
            yield from delta(heads, theirs, f"{ours}linear_attn.")


# -- the tower --------------------------------------------------------------------------------------------------------

_TOWER = {
    **linear("v.patch_embd", "patch_embed.proj"),
    "v.position_embd.weight": "pos_embed.weight",
    **linear("v.post_ln", "merger.norm"),
    **linear("mm.0", "merger.linear_fc1"),
    **linear("mm.2", "merger.linear_fc2"),
}
_TOWER_LAYER = {
    **linear("ln1", "norm1"),
    **linear("ln2", "norm2"),
    **linear("attn_qkv", "attn.qkv"),
    **linear("attn_out", "attn.proj"),
    **linear("ffn_up", "mlp.linear_fc1"),
    **linear("ffn_down", "mlp.linear_fc2"),
}


def _frames(*halves: torch.Tensor) -> torch.Tensor:
    """The projections of patches of each frame `[h, 3, p, p]` -> `[h, 3, frames, p, p]`."""
    return torch.stack(halves, 2)


def _tower(model: GgufModel) -> Iterator[Made]:
    patches = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    for made in renamed(model, "", "model.visual.", _TOWER):
        yield made if made.sources[0] not in patches else Made(made.name, patches, _frames)
    assert model.tower is not None
    for index in range(model.tower.count("vision.block_count", most=4096)):
        yield from renamed(model, f"v.blk.{index}.", f"model.visual.blocks.{index}.", _TOWER_LAYER)


def _vision_config(model: GgufModel, tower: Any, hidden: int) -> dict[str, Any]:
    deep = tower.listed("vision.is_deepstack_layers", bool, default=[])
    return {
        "depth": tower.count("vision.block_count"),
        "hidden_size": tower.count("vision.embedding_length"),
        "intermediate_size": tower.count("vision.feed_forward_length"),
        "num_heads": tower.count("vision.attention.head_count"),
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": tower.count("vision.patch_size"),
        "temporal_patch_size": TEMPORAL_PATCH,
        "spatial_merge_size": tower.count("vision.spatial_merge_size", 2),
        "in_channels": 3,
        "num_position_embeddings": model.shape("v.position_embd.weight", 2)[0],
        "out_hidden_size": hidden,
        "deepstack_visual_indexes": [index for index, found in enumerate(deep) if found],
    }


def _processor(tower: Any, released: Resizing, sizes: dict[str, int]) -> dict[str, Any]:
    """The settings of the image or video processor."""
    limits = {
        edge: tower.count(f"vision.image_{name}_pixels", default)
        for edge, name, default in (
            ("shortest_edge", "min", released.min_pixels), ("longest_edge", "max", released.max_pixels)
        )
    }  # fmt: skip
    channels = {name: tower.listed(f"vision.image_{name}", float, 3) for name in ("mean", "std")}
    return {"size": limits, "image_mean": channels["mean"], "image_std": channels["std"], **sizes}


def _files(model: GgufModel, *, moe: bool) -> dict[str, dict[str, Any]]:
    text = text_config(model, moe=moe)
    name = "Qwen3_5Moe" if moe else "Qwen3_5"
    tower = model.tower
    if tower is None:
        return {"config.json": {"architectures": [f"{name}ForCausalLM"], **text}}
    vision = _vision_config(model, tower, text["hidden_size"])
    tower.only("vision.projection_dim", text["hidden_size"])
    names = ("patch_size", "temporal_patch_size")
    sizes = {name: vision[name] for name in names} | {"merge_size": vision["spatial_merge_size"]}
    model.defaults.append(
        f"images of {RELEASED_IMAGE.min_pixels} to {RELEASED_IMAGE.max_pixels} pixels and clips of "
        f"{RELEASED_VIDEO.min_pixels} to {RELEASED_VIDEO.max_pixels}, at 2 frames per second"
    )
    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    around = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": "qwen3_5_moe" if moe else "qwen3_5",
        **{f"{part}_token_id": model.token(text) for part, text in (tokens | around).items()},
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
        "text_config": text,
        "vision_config": vision,
    }
    return {
        "config.json": config,
        "preprocessor_config.json": _processor(tower, RELEASED_IMAGE, sizes),
        "video_preprocessor_config.json": _processor(tower, RELEASED_VIDEO, sizes),
    }


def _vision_language(model: GgufModel) -> Iterator[Made]:
    yield from decoder(model, "model.language_model.")
    yield from _tower(model)


LAYOUTS = tuple(
    Layout(name, partial(_files, moe=moe), weights, projector)
    for name, moe in (("qwen35", False), ("qwen35moe", True))
    for projector, weights in (("", decoder), ("qwen3vl_merger", _vision_language))
)
