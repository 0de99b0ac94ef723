"""The family's models in GGUF files: llama.cpp's architecture `qwen3next`.

Source: `Qwen3NextModel` in `conversion/qwen.py` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from families.gguf_model import GgufModel, Layout, Made
from families.gguf_weights import MINUS_EXP, Weight, convolution, each, stacked_rows, vector
from families.qwen3_5.gguf import DeltaHeads, decoder, text_config


def _by_key_head(qkv: Weight, gates: Weight, heads: DeltaHeads) -> Weight:
    """The rows of all queries, keys, values, and gates -> of each key head its query, key, values and gates."""
    width = heads.each * heads.value_width
    widths = heads.key_width, heads.key_width, width, width

    def change(part: Tensor) -> Tensor:
        parts = part.split([heads.keys * wide for wide in widths])
        grouped = [rows.unflatten(0, (heads.keys, wide)) for rows, wide in zip(parts, widths, strict=True)]
        return torch.cat(grouped, 1).flatten(0, 1)

    return each(stacked_rows(qkv, gates), change)


def _delta(heads: DeltaHeads, theirs: str, ours: str) -> Iterator[Made]:
    sources = f"{theirs}attn_qkv.weight", f"{theirs}attn_gate.weight"
    yield Made(f"{ours}in_proj_qkvz.weight", sources, partial(_by_key_head, heads=heads))
    yield Made(f"{ours}in_proj_ba.weight", (f"{theirs}ssm_ba.weight",))
    yield Made(f"{ours}dt_bias", (f"{theirs}ssm_dt.bias",), vector)
    yield Made(f"{ours}A_log", (f"{theirs}ssm_a",), vector, MINUS_EXP)
    yield Made(f"{ours}conv1d.weight", (f"{theirs}ssm_conv1d.weight",), convolution)
    yield Made(f"{ours}norm.weight", (f"{theirs}ssm_norm.weight",), vector)
    yield Made(f"{ours}out_proj.weight", (f"{theirs}ssm_out.weight",))


def _files(model: GgufModel) -> dict[str, dict[str, Any]]:
    text = text_config(model, moe=True)
    dense = [index for index in range(model.layers) if f"blk.{index}.ffn_gate_inp.weight" not in model.shapes]
    rope = {name: value for name, value in text["rope_parameters"].items() if not name.startswith("mrope")}
    text |= {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "rope_parameters": rope,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "intermediate_size": model.metadata.in_layers("feed_forward_length", model.layers + model.heads),
        "num_nextn_predict_layers": text.pop("mtp_num_hidden_layers"),
    }
    return {"config.json": text}


LAYOUTS = (Layout("qwen3next", _files, partial(decoder, delta=_delta)),)
