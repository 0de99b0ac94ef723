"""Every number of every family's `config.json`, replaced by wrong and by odd ones: an error names the field."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published_models import minicpm, models

from families import CheckpointError, ModelFiles, family_of
from families.minicpmv4_7.positions import Markers
from families.registry import FAMILIES

WRONG = (0, -1, 1.5, 7, 10**400, None, "x")
"""7 divides no size, and is no power of two."""
MAMBA = {
    "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 256,
}  # fmt: skip
GRANITE = {
    "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512,
    "shared_intermediate_size": 1024, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"],
    "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 62, "num_experts_per_tok": 6,
    "embedding_multiplier": 12, "logits_scaling": 6, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
    "rms_norm_eps": 1e-5, "position_embedding_type": "rope", "rope_theta": 10000, "max_position_embeddings": 131072,
    **MAMBA,
}  # fmt: skip
"""With the fields of Granite 4.0 H Tiny."""
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "nemotron_h": {
        "mamba_d_conv": 4, "mamba_n_groups": 8, "mamba_chunk_size": 128, "num_local_experts": 128, "n_group": 1,
        "topk_group": 1, "time_step_limit": [0.0, 1.0], "num_nextn_predict_layers": 1, "layer_norm_epsilon": 1e-5,
        "moe_latent_size": 1024,
    },
    "nemotron_h_omni": {
        "downsample_ratio": 0.5, "vit_hidden_size": 1280, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3,
    },
}  # fmt: skip
"""Further fields, which the other files do not have."""


def configurations() -> dict[str, dict[str, Any]]:
    """By `model_type`."""
    found = {"granitemoehybrid": GRANITE}
    found |= {config["model_type"]: config for config in models().values()}
    markers = {f"{name}_id": 10 + index for index, name in enumerate(Markers._fields)}
    found["minicpmv4_7"] = {**minicpm(), "model_type": "minicpmv4_7", "video_token_id": 248057, **markers}
    return {kind: {**config, **MORE.get(kind, {})} for kind, config in found.items()}


CONFIGS = configurations()


def numbers(part: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys and indices that lead to each number."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        if isinstance(value, dict | list):
            yield from numbers(value, (*place, key))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*place, key)


def error_of(config: dict[str, Any]) -> str:
    """The message of the family's error; empty if it reads the configuration."""
    try:
        family_of(config["model_type"]).read_config(ModelFiles(Path(), config, {}, {}, {}))
    except CheckpointError as error:
        return str(error)
    return ""


def test_every_family_has_a_configuration() -> None:
    assert {family.name for family in FAMILIES} <= CONFIGS.keys()
    assert {kind: error for kind, config in CONFIGS.items() if (error := error_of(config))} == {}


@pytest.mark.parametrize("kind", CONFIGS)
def test_errors_name_the_field(kind: str) -> None:
    refused = 0
    for place in numbers(CONFIGS[kind]):
        field = next(key for key in reversed(place) if isinstance(key, str))
        for value in WRONG:
            config = copy.deepcopy(CONFIGS[kind])
            holder = config
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = value
            error = error_of(config)
            # Null may be a value of its own, with which other fields are at fault.
            named = {field} if value is not None else set(re.findall(r"\w+", json.dumps(CONFIGS[kind])))
            assert not error or named & set(re.findall(r"\w+", error)), f"{place}: {value!r:.20}: {error:.300}"
            refused += bool(error)
    assert refused > 50
