"""`nemotron_h`'s part of `config.json` -> `DecoderConfig`.

Two generations of field names are in circulation: the ones that transformers writes (`layers_block_type`) and the ones
in NVIDIA's released files (`hybrid_override_pattern`). Both are read; where a file carries both, the current one wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from decoder.config import DecoderConfig
from families.family import FamilyConfig, ModelFiles
from families.files import CheckpointError, first

_LAYER_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
# Names that older files and transformers' own keyword aliases use -> the name in DecoderConfig.
_TEXT_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "attention_head_dim": "head_dim",
    "rms_norm_eps": "layer_norm_epsilon",
    "num_local_experts": "n_routed_experts",
}


def layer_pattern(text: Mapping[str, Any]) -> str:
    """The layer kinds as a string over `M*-E`, from either way of writing them."""
    if (kinds := first(text, "layers_block_type", "layer_types")) is not None:
        unknown = sorted({kind for kind in kinds if kind not in _LAYER_LETTERS})
        if unknown:
            raise CheckpointError(f"layers_block_type holds {unknown}; known kinds are {sorted(_LAYER_LETTERS)}")
        return "".join(_LAYER_LETTERS[kind] for kind in kinds)
    pattern = str(first(text, "hybrid_override_pattern", default=""))
    if not pattern or set(pattern) - set("M*-E"):
        raise CheckpointError(
            f"config.json must give layers_block_type or a hybrid_override_pattern over 'M*-E', got {pattern!r}"
        )
    return pattern


def mtp_pattern(text: Mapping[str, Any]) -> str | None:
    """The layer kinds of the heads that predict further tokens, from either way of writing them; None where unset."""
    if (kinds := text.get("mtp_layers_block_type")) is not None:
        unknown = sorted({str(kind) for kind in kinds if kind not in _LAYER_LETTERS})
        if unknown:
            raise CheckpointError(f"mtp_layers_block_type holds {unknown}; known kinds are {sorted(_LAYER_LETTERS)}")
        return "".join(_LAYER_LETTERS[kind] for kind in kinds)
    return None if text.get("mtp_hybrid_override_pattern") is None else str(text["mtp_hybrid_override_pattern"])


def decoder_config(text: Mapping[str, Any]) -> DecoderConfig:
    """The text part of a config -> DecoderConfig. Unset fields take the defaults of the model family."""
    known = {f.name: f for f in fields(DecoderConfig)}
    values: dict[str, Any] = {"pattern": layer_pattern(text)}
    for source, target in _TEXT_ALIASES.items():
        if text.get(source) is not None:
            values[target] = text[source]
    values |= {name: text[name] for name in known if text.get(name) is not None}
    if (pattern := mtp_pattern(text)) is not None:
        values["mtp_pattern"] = pattern
    if text.get("num_key_value_heads") is None and "num_attention_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "time_step_limit" in values:
        low, high = values["time_step_limit"]
        values["time_step_limit"] = (float(low), math.inf if high is None else float(high))
    for name in ("mlp_hidden_act", "mamba_hidden_act"):
        expected = "relu2" if name.startswith("mlp") else "silu"
        if text.get(name, expected) != expected:
            raise CheckpointError(f"config.json: {name} is {text[name]!r}; this family is served with {expected!r}")
    if text.get("sliding_window") is not None:
        raise CheckpointError("config.json: sliding_window is set; sliding-window attention is not served")
    missing = sorted(
        f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    )
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")
    try:
        return DecoderConfig(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error}") from None


def read_config(files: ModelFiles) -> FamilyConfig:
    """Of a text-only model. Raises CheckpointError with the field at fault."""
    return FamilyConfig(files.config, decoder_config(files.config))
