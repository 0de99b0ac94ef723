"""`config.json` -> `DecoderConfig`. Reference: transformers, models/qwen3_next/configuration_qwen3_next.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from families import fields
from families.files import CheckpointError, first
from families.qwen3_5.config import decoder_config as qwen_decoder

DEFAULTS = {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10}
"""Of the fields whose defaults differ from those of Qwen3.5."""


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    text = {**text, **{name: first(text, name, default=default) for name, default in DEFAULTS.items()}}
    text["mtp_num_hidden_layers"] = heads = first(text, "num_nextn_predict_layers", default=0)
    if heads not in (0, 1):
        raise CheckpointError(f"config.json: num_nextn_predict_layers is {heads!r}; 0 and 1 are served")
    moe, tied = text["num_experts"] != 0, fields.flag(text, "tie_word_embeddings")
    return qwen_decoder(text, moe=moe, tied=tied, dense=_dense_layers(text) if moe else ())


def _dense_layers(text: Mapping[str, Any]) -> set[int]:
    """The layers with an MLP in place of experts."""
    layers = fields.count(text, "num_hidden_layers", most=fields.MOST_LAYERS)
    step, named = fields.count(text, "decoder_sparse_step", 1), first(text, "mlp_only_layers", default=[])
    if not isinstance(named, list) or any(type(index) is not int for index in named):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of whole numbers, not {named!r}")
    return {index for index in range(layers) if index in named or (index + 1) % step}


read_config = fields.text_only(decoder_config)
