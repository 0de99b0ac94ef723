"""Errors of a configuration, and the weights that it expects."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiny_decoder import oracle, tiny_config, weights_of

from decoder.config import DecoderConfig, DecoderOptions
from decoder.request import DecoderRequest
from decoder.sampling import SamplingParams


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"pattern": ""}, "at least one layer", id="empty-pattern"),
        pytest.param({"pattern": "MX"}, r"\['X'\]", id="unknown-kind"),
        pytest.param({"vocab_size": 0}, "vocab_size .* not 0", id="no-vocabulary"),
        pytest.param({"n_groups": 3}, "4 is not a multiple of n_groups 3", id="groups"),
        pytest.param({"chunk_size": 100}, "power of two, not 100", id="chunk"),
        pytest.param({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3", id="kv-heads"),
        pytest.param({"mlp_hidden_act": "swiglu"}, "'swiglu'", id="activation"),
        pytest.param({"n_group": 3}, "4 is not a multiple of n_group 3", id="expert-groups"),
        pytest.param({"n_group": 2, "topk_group": 3}, "topk_group 3 is above n_group 2", id="kept-groups"),
        pytest.param({"num_experts_per_tok": 5}, "5 is above the 4 experts", id="chosen-experts"),
        pytest.param({"time_step_limit": (1.0, 0.5)}, "not 1.0 and 0.5", id="time-step"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**{"pattern": "M-*E", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"mlp_hidden_act": "swiglu"}, "mlp_hidden_act 'swiglu' is not one of", id="activation"),
        pytest.param({"mtp_pattern": "*-", "mlp_hidden_act": "swiglu"}, "'swiglu'", id="activation-of-an-mlp"),
        pytest.param({"mtp_pattern": "*-", "intermediate_size": 0}, "intermediate_size .* not 0", id="mlp"),
        pytest.param({"num_experts_per_tok": 5}, "5 is above the 4 experts", id="experts"),
        pytest.param({"moe_latent_size": 0}, "moe_latent_size .* not 0", id="latent"),
        pytest.param({"num_key_value_heads": 3}, "num_key_value_heads 3", id="attention"),
        pytest.param({"mtp_pattern": "M", "chunk_size": 100}, "power of two, not 100", id="mamba"),
        pytest.param({"mtp_pattern": ""}, "mtp_pattern is empty", id="empty"),
        pytest.param({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers .* not -1", id="negative"),
    ],
)
def test_layers_of_a_drafting_head_are_checked_where_the_trunk_has_none(changes: dict[str, Any], message: str) -> None:
    trunk = "*" if "chunk_size" in changes else "M"
    with pytest.raises(ValueError, match=message):
        tiny_config(trunk, **{"num_nextn_predict_layers": 1, **changes})
    if changes.get("num_nextn_predict_layers") is None:
        assert len(tiny_config(trunk, **changes).layers) == 1  # no layers have these indices


def test_layers_that_are_not_there_are_not_checked() -> None:
    assert len(tiny_config("*", n_groups=3, n_group=7).pages) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqs": 0}, "max_seqs .* not 0"),
        ({"max_len": 1}, "max_len .* not 1"),
        ({"max_chunk": 0}, "max_chunk .* not 0"),
        ({"memory_share": 1.5}, "memory_share .* not 1.5"),
        ({"dtype": torch.int8}, "floating"),
        ({"state_dtype": torch.float16}, "state_dtype must be float32 or bfloat16, not torch.float16"),
        ({"state_dtype": torch.bfloat16, "device": "cuda"}, "state_dtype bfloat16 needs a CPU, and the device is cuda"),
    ],
)
def test_refused_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderOptions(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_bias": True, "mlp_bias": True, "moe_latent_size": 8, "use_conv_bias": False},
        {"tie_word_embeddings": True},
    ],
)
def test_expected_weights_are_those_of_transformers(changes: dict[str, Any]) -> None:
    config: DecoderConfig = tiny_config("M-*E", **changes)
    theirs = {name: tuple(tensor.shape) for name, tensor in weights_of(oracle(config), config).items()}
    assert config.expected_weights() == theirs


def test_attention_biases_are_optional() -> None:
    config = tiny_config("*", attention_bias=True)
    prefix = "model.layers.0.mixer."
    assert config.optional_weights() == {prefix + f"{name}_proj.bias" for name in "qkvo"}
    assert config.optional_weights() < set(config.expected_weights())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("temperature", 1e39),
        ("temperature", float("inf")),
        ("top_p", float("nan")),
        ("top_k", 2**31),
        ("min_p", -1e-9),
        ("min_p", float("nan")),
        ("repetition_penalty", 1e-60),
        ("repetition_penalty", 1e60),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", float("inf")),
        ("presence_penalty", -2e10),
        ("frequency_penalty", 1e300),
        ("frequency_penalty", -1e300),
        ("frequency_penalty", float("nan")),
        ("seed", -1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 1025),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 5000),
    ],
)
def test_refused_sampling(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} must be .*{re.escape(str(value))}"):
        SamplingParams(**{field: value})


def test_minus_one_is_no_top_k_as_in_other_servers() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_refused_sampling_of_ids() -> None:
    with pytest.raises(ValueError, match="token -3"):
        SamplingParams(logit_bias={-3: 1.0})
    for bias in (float("inf"), float("-inf"), float("nan"), 1.1e10, -1.1e10):
        with pytest.raises(
            ValueError, match=f"logit_bias of token 3 is {re.escape(str(bias))}; .* biases from -1e\\+10 to 1e\\+10"
        ):
            SamplingParams(logit_bias={3: bias})
    with pytest.raises(ValueError, match="min_tokens 5 is above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match="-1"):
        SamplingParams(stop_token_ids=frozenset({-1}))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (0.0, 1e6)),
        ("top_p", (1e-300, 1.0)),
        ("top_k", (0, 2**31 - 1)),
        ("min_p", (0.0, 1.0)),
        ("repetition_penalty", (1e-3, 1e3)),
        ("presence_penalty", (-1e10, 1e10)),
        ("frequency_penalty", (-1e10, 1e10)),
        ("logit_bias", ({0: -1e10}, {0: 1e10})),
        ("seed", (0, 2**64 - 1)),
        ("logprobs", (0, 1024)),
        ("prompt_logprobs", (0, 1024)),
        ("max_tokens", (1,)),
    ],
)
def test_the_bounds_of_sampling_are_allowed(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_a_temperature_too_small_for_float32_is_greedy() -> None:
    for value in (0.0, -0.0, 1e-320, 1e-39, 9.9e-6):
        made = SamplingParams(temperature=value)
        assert made.greedy and made.plain and made.temperature == 0.0
    assert not SamplingParams(temperature=1e-5).greedy and SamplingParams(temperature=1e-5).temperature == 1e-5


def test_refused_numbers_of_a_request() -> None:
    with pytest.raises(ValueError, match="eos_token_ids holds -1; ids are at least 0"):
        DecoderRequest("a", [1], SamplingParams(), eos_token_ids=frozenset({5, -1}))
    for index in (-1, 2**32):
        with pytest.raises(ValueError, match=f"sample_index must be from 0 to 4294967295, not {index}"):
            DecoderRequest("a", [1], SamplingParams(), sample_index=index)
    assert DecoderRequest("a", [1], SamplingParams(), sample_index=2**32 - 1, eos_token_ids=frozenset({0}))


def test_sampling_does_not_change_behind_its_back() -> None:
    bias = {1: 2.0}
    sampling = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert sampling.logit_bias[1] == 2.0
