"""Fields of LFM3's configuration, compared with transformers, and values that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_models import models
from transformers import Lfm3Config
from transformers.models.lfm3.modeling_lfm3 import Lfm3RotaryEmbedding

from decoder.layers.descriptions import Attention, Mlp
from decoder.layers.recurrent_descriptions import ShortConv
from families import CheckpointError
from families.family import ModelFiles
from families.lfm3 import FAMILY
from families.lfm3.names import targets
from kernels.rotary import rope_table

TINY: dict[str, Any] = {
    "model_type": "lfm3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def read(**changes: Any) -> Any:
    return FAMILY.read_config(ModelFiles(Path(), TINY | changes)).decoder


def kinds(decoder: Any) -> list[str]:
    of = {type(None): FULL, int: SLIDING}
    return [of[type(mixer.window)] if isinstance(mixer, Attention) else "conv" for mixer in decoder.mixers[::2]]


def ropes(*given: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((SLIDING, FULL), given, strict=False))


def test_an_empty_file_means_the_published_model() -> None:
    """Nested sections are saved without fields that have their defaults."""
    decoder = FAMILY.read_config(ModelFiles(Path(), {})).decoder
    assert decoder == FAMILY.read_config(ModelFiles(Path(), models()["LFM3-1.7B"])).decoder
    config, mixers = Lfm3Config(), decoder.mixers
    assert kinds(decoder) == config.layer_types and decoder.position_axes == 1
    assert {mixer.conv_kernel for mixer in mixers if isinstance(mixer, ShortConv)} == {config.conv_L_cache}
    assert {mixer.intermediate_size for mixer in mixers if isinstance(mixer, Mlp)} == {config.intermediate_size}
    attention = next(mixer for mixer in mixers if isinstance(mixer, Attention) and mixer.window)
    sizes = (attention.num_attention_heads, attention.kv_heads, attention.head_dim, attention.window)
    assert sizes == (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.sliding_window
    )  # fmt: skip
    assert attention.head_gate and not attention.attention_bias and attention.qk_norm == config.norm_eps
    assert all(layer.norm_before and layer.norm_after for layer in decoder.layers)
    assert decoder.tie_word_embeddings and decoder.max_position_embeddings == config.max_position_embeddings
    assert (decoder.vocab_size, decoder.hidden_size) == (config.vocab_size, config.hidden_size)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_hidden_layers": 2},
        {"layer_types": [SLIDING, "conv", "conv", "conv", "conv"]},
        {"rope_parameters": ropes({"rope_theta": 5e3}, {"rope_type": "proportional", "partial_rotary_factor": 0.3})},
        {"rope_parameters": ropes({"type": "default"}, {"rope_type": "proportional"}), "rope_theta": 7e4},
    ],
    ids=str,
)
def test_layers_and_their_cosines_and_sines(fields: dict[str, Any]) -> None:
    oracle, decoder = Lfm3Config(**(TINY | fields)), read(**fields)
    assert kinds(decoder) == oracle.layer_types
    embedding, attention = Lfm3RotaryEmbedding(oracle), [m for m in decoder.mixers if isinstance(m, Attention)]
    assert decoder.position_axes == int(bool(attention))
    for mixer in attention:
        assert mixer.rope is not None
        positions = torch.arange(9)[None]
        cos, sin = embedding(torch.zeros(1), positions, SLIDING if mixer.window else FULL)
        expected = torch.stack((cos[0], sin[0]), 1)[..., : TINY["head_dim"] // 2]
        torch.testing.assert_close(rope_table(mixer.rope, 9, "cpu"), expected, rtol=1e-6, atol=1e-6)


def test_what_can_be_switched_off() -> None:
    plain = read(use_sandwich_norm=False, use_attention_gate=False, attention_bias=True, conv_bias=True)
    assert not any(layer.norm_after for layer in plain.layers)
    assert {mixer.head_gate for mixer in plain.mixers if isinstance(mixer, Attention)} == {False}
    assert all(mixer.attention_bias for mixer in plain.mixers if isinstance(mixer, Attention))
    assert all(mixer.conv_bias for mixer in plain.mixers if isinstance(mixer, ShortConv))
    assert not read(tie_word_embeddings=False).tie_word_embeddings


def test_the_alias_of_epsilon_goes_first() -> None:
    both = {"norm_eps": 1e-3, "rms_norm_eps": 1e-4}
    assert read(**both).norm_eps == Lfm3Config(**(TINY | both)).norm_eps == 1e-4
    assert read(norm_eps=1e-3) == replace(read(rms_norm_eps=1e-3))


def test_either_name_of_the_gates() -> None:
    [gate], [renamed] = (targets(f"model.layers.2.self_attn.{name}.weight") for name in ("gate_proj", "g_proj"))
    assert gate == renamed and gate.name == "model.layers.4.mixer.g_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 4 + ["mamba"]}, r"layer_types holds \['mamba'\]; known kinds are"),
        ({"layer_types": ["conv"]}, "layer_types names 1 layers and num_hidden_layers is 5"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1; at least 2 taps are served"),
        ({"sliding_window": None}, "lacks sliding_window"),
        ({"sliding_window": 0}, "sliding_window must be a whole number of at least 1, not 0"),
        ({"use_attention_gate": 1}, "use_attention_gate must be true or false, not 1"),
        ({"use_sandwich_norm": "no"}, "use_sandwich_norm must be true or false, not 'no'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"is_causal": False}, "is_causal is False"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is {'rope_type': 'yarn'}"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters has rope_type; served are sliding_attention"),
        ({"rope_parameters": {}}, "lacks full_attention|lacks sliding_attention"),
        ({"rope_parameters": ropes({})}, "lacks full_attention"),
        ({"rope_parameters": ropes({}, 1)}, "rope_parameters.full_attention must be an object, not 1"),  # type: ignore[arg-type]
        ({"rope_parameters": ropes({}, {"beta_fast": 1})}, "rope_parameters.full_attention has beta_fast, which is"),
        ({"rope_parameters": ropes({}, {"rope_type": "yarn"})}, "rope_type 'yarn' is not served"),
        ({"rope_parameters": ropes({"partial_rotary_factor": 0.5}, {})}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": ropes({"factor": 2.0}, {})}, "factor is 2.0"),
        ({"rope_parameters": ropes({}, {"rope_type": "proportional", "factor": 2.0})}, "factor is 2.0"),
        (
            {"rope_parameters": ropes({}, {"rope_type": "proportional", "partial_rotary_factor": 0.1})},
            "partial_rotary_factor 0.1 makes 0 of 8 frequencies rotate",
        ),
        (
            {"rope_parameters": ropes({}, {"rope_type": "proportional", "partial_rotary_factor": 1.5})},
            "partial_rotary_factor 1.5 makes 12 of 8 frequencies rotate",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ],
    ids=str,
)
def test_configurations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**changes)
