"""Fields of LFM2's configuration, compared with transformers, and values that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published_models import models
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from decoder.layers.descriptions import Attention, Mlp, ShortConv
from families import CheckpointError
from families.family import ModelFiles
from families.lfm2 import FAMILY

TINY: dict[str, Any] = {
    "model_type": "lfm2", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 50, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "block_multiple_of": 8,
}  # fmt: skip


def read(**changes: Any) -> Any:
    return FAMILY.read_config(ModelFiles(Path(), TINY | changes)).decoder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_ff_dim": 77},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_ffn_dim_multiplier": 2, "block_multiple_of": 5},
        {"block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.3},
        {"intermediate_size": 12288},
    ],
    ids=str,
)
def test_width_of_mlps(changes: dict[str, Any]) -> None:
    config = Lfm2Config(**(TINY | changes))
    found = next(mixer for mixer in read(**changes).mixers if isinstance(mixer, Mlp))
    assert found.intermediate_size == Lfm2MLP(config).w1.out_features


def test_width_of_mlps_without_a_multiplier() -> None:
    """Two thirds, not rounded: transformers 5.23 takes no null, and earlier releases did this."""
    found = next(mixer for mixer in read(block_ffn_dim_multiplier=None).mixers if isinstance(mixer, Mlp))
    assert found.intermediate_size == 33


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["tie_embedding", "tie_word_embeddings"])
def test_either_name_ties_the_projection(name: str, tied: bool) -> None:
    """`tie_embedding` goes first; without either, the projection is tied."""
    other = {"tie_word_embeddings": not tied} if name == "tie_embedding" else {}
    fields = {name: tied, **other}
    assert read(**fields).tie_word_embeddings == Lfm2Config(**(TINY | fields)).tie_word_embeddings == tied
    assert read().tie_word_embeddings == Lfm2Config(**TINY).tie_word_embeddings is True


@pytest.mark.parametrize(
    "fields",
    [{}, {"full_attn_idxs": [1]}, {"full_attn_idxs": []}, {"layer_types": ["conv", "full_attention", "conv"]},
     {"layer_types": ["conv"] * 3, "full_attn_idxs": [0]}],
    ids=str,
)  # fmt: skip
def test_which_layers_are_attention(fields: dict[str, Any]) -> None:
    config = read(**fields)
    found = ["full_attention" if isinstance(mixer, Attention) else "conv" for mixer in config.mixers[::2]]
    assert found == Lfm2Config(**(TINY | fields)).layer_types
    assert config.position_axes == int("full_attention" in found)


@pytest.mark.parametrize(
    "fields", [{}, {"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}}], ids=str
)
def test_base_of_the_frequencies(fields: dict[str, Any]) -> None:
    [rope] = read(**fields).ropes
    assert (rope.theta, rope.dims) == (Lfm2Config(**(TINY | fields)).rope_parameters["rope_theta"], 4)


def test_a_published_configuration() -> None:
    decoder = FAMILY.read_config(ModelFiles(Path(), models()["LFM2-1.2B"])).decoder
    mlps = {mixer.intermediate_size for mixer in decoder.mixers if isinstance(mixer, Mlp)}
    convolutions = [mixer for mixer in decoder.mixers if isinstance(mixer, ShortConv)]
    assert mlps == {8192} and len(convolutions) == 10 and convolutions[0].conv_kernel == 3
    assert decoder.tie_word_embeddings and decoder.scan_chunk is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "mamba", "conv"]}, r"layer_types holds \['mamba'\]; known kinds are"),
        ({"layer_types": "conv"}, "layer_types holds conv"),
        ({"layer_types": ["conv"]}, "layer_types names 1 layers and num_hidden_layers is 3"),
        ({"full_attn_idxs": [3]}, "full_attn_idxs names layer 3 of 3"),
        ({"full_attn_idxs": [1.0]}, r"full_attn_idxs must be a list of whole numbers, not \[1.0\]"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1; at least 2 taps are served"),
        ({"conv_L_cache": 2.5}, "conv_L_cache must be a whole number of at least 1, not 2.5"),
        ({"conv_bias": 1}, "conv_bias must be true or false, not 1"),
        ({"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier must be a number above 0, not 0"),
        ({"block_multiple_of": "8"}, "block_multiple_of must be a whole number of at least 1, not '8'"),
        ({"block_ff_dim": -4}, "block_ff_dim must be a whole number of at least 1, not -4"),
        ({"intermediate_size": 1, "block_ffn_dim_multiplier": None}, "intermediate_size 1 with block_auto_adjust"),
        ({"block_auto_adjust_ff_dim": "no"}, "block_auto_adjust_ff_dim must be true or false, not 'no'"),
        ({"tie_embedding": "yes"}, "tie_embedding must be true or false, not 'yes'"),
        ({"norm_eps": 0}, "norm_eps must be a number above 0, not 0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn' is not served"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": -1}, "rope_theta must be a number above 0, not -1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 5}, "head_dim times partial_rotary_factor is 5; it must be even"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"is_causal": False}, "is_causal is False"),
        ({"block_use_swiglu": False}, "block_use_swiglu is False"),
        ({"use_pos_enc": False}, "use_pos_enc is False"),
        ({"vocab_size": None}, "lacks vocab_size"),
    ],
    ids=str,
)  # fmt: skip
def test_configurations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**changes)
