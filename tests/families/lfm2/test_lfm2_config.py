"""Fields of LFM2's configuration, compared with transformers, and values that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from published_models import models
from transformers import Lfm2Config, Lfm2MoeConfig, Lfm2MoeForCausalLM
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.recurrent_descriptions import ShortConv
from families import CheckpointError
from families.family import ModelFiles
from families.lfm2 import FAMILY, MOE_FAMILY
from service.model.checkpoint import Checkpoint

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


MOE: dict[str, Any] = TINY | {
    "layer_types": ["conv", "full_attention", "conv"], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "num_dense_layers": 1,
}  # fmt: skip


def read_moe(**changes: Any) -> Any:
    return MOE_FAMILY.read_config(ModelFiles(Path(), MOE | changes)).decoder


@pytest.mark.parametrize("dense", [0, 1, 2, 5])
def test_which_layers_have_experts(dense: int) -> None:
    """MLPs have the width that the file says: nothing is adjusted."""
    config = read_moe(num_dense_layers=dense)
    assert [isinstance(mixer, Experts) for mixer in config.mixers[1::2]] == [index >= dense for index in range(3)]
    assert {mixer.intermediate_size for mixer in config.mixers if isinstance(mixer, Mlp)} == ({50} if dense else set())


@pytest.mark.parametrize("naming", ["released", "native"])
def test_experts_are_stored_one_by_one_or_in_stacks(tmp_path: Path, naming: str) -> None:
    torch.manual_seed(0)
    model = Lfm2MoeForCausalLM(Lfm2MoeConfig(**{name: value for name, value in MOE.items() if name != "model_type"}))
    model.save_pretrained(tmp_path, save_original_format=naming == "released")
    found = dict(Checkpoint(tmp_path).decoder_weights())
    stored = dict(model.named_parameters())["model.layers.1.feed_forward.experts.gate_up_proj"]
    gate, up = (found[f"model.layers.3.mixer.experts.{name}_proj"] for name in ("gate", "up"))
    for expert in range(4):
        assert torch.equal(torch.cat((gate[expert], up[expert])), stored[expert])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": None}, "lacks layer_types"),
        ({"num_dense_layers": -1}, "num_dense_layers must be a whole number of at least 0, not -1"),
        ({"num_dense_layers": True}, "num_dense_layers must be a whole number of at least 0, not True"),
        ({"num_experts": 0}, "num_experts must be a whole number of at least 1, not 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is above the 4 experts"),
        ({"moe_intermediate_size": "8"}, "moe_intermediate_size must be a whole number of at least 1, not '8'"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor must be a number above 0, not 0"),
        ({"use_expert_bias": 1}, "use_expert_bias must be true or false, not 1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, not 'yes'"),
    ],
    ids=str,
)
def test_configurations_with_experts_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_moe(**changes)


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
        ({"head_dim": 5}, "times partial_rotary_factor is 5; it must be even"),
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
