"""With each instruction set that this processor has, no option changes an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from gated_decoder import gated_config
from instruction_set import using
from speculation import answers
from tiny_decoder import delta_config, greedy_params, random_weights, request, run, tiny_config

from decoder.config import DecoderConfig, DecoderOptions
from decoder.runner import DecoderRunner
from kernels.native.instruction_sets import processor_features, supported

pytestmark = needs_compiled


AUTO = {each.name for each in supported(processor_features())[:1]}


@pytest.fixture(params=[name for name in ("amx", "avx512bf16", "avx512", "avx2") if name not in AUTO])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The sets that "auto" does not choose on this processor: all other tests use the one that it chooses."""
    with using(request.param, monkeypatch):
        yield request.param


MODELS: dict[str, DecoderConfig] = {
    "mamba": tiny_config("M-*EM*", num_nextn_predict_layers=1, ssm_state_size=64, n_groups=1),
    "delta": delta_config("G-*G", num_nextn_predict_layers=1),
    "short": gated_config("S-*S", mtp=True, gate=False, head_gate=True, window=9),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {"max_seqs": 1},
    "chunks": {"max_chunk": 5, "state_cache": "all"},
    "drafts": {"speculative": "ngram", "spec_state": "replay", "max_chunk": 7},
    "drafts-slots": {"speculative": "mtp", "spec_state": "slots"},
    "preempted": {"preempted": True, "state_cache": "align"},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("dtype", "states"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["bfloat16", "float32", "bfloat16-states16"],
)
def test_no_option_changes_an_answer(chosen: str, model: str, dtype: torch.dtype, states: torch.dtype) -> None:
    given: dict[str, Any] = {
        "config": MODELS[model], "dtype": dtype, "state_dtype": states, "native": "on", "output": 16,
    }  # fmt: skip
    plain = answers(state_cache="none", **given)
    for name, options in OPTIONS.items():
        if name == "drafts":
            options = {**options, "known": plain.drawn}
        found = answers(**given, **options)
        assert found.drawn == plain.drawn, name
        assert found.logprobs == plain.logprobs, name


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8", "nvfp4"])
def test_no_option_changes_an_answer_of_quantised_weights(chosen: str, weights: str) -> None:
    config = tiny_config("M-*E", hidden_size=64, intermediate_size=64, moe_intermediate_size=32)
    given: dict[str, Any] = {
        "config": config,
        "dtype": torch.bfloat16,
        "weights": weights,
        "native": "on",
        "output": 12,
    }
    plain = answers(state_cache="none", **given)
    for options in (OPTIONS["alone"], OPTIONS["chunks"]):
        found = answers(**given, **options)
        assert found.drawn == plain.drawn and found.logprobs == plain.logprobs, options


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with using("amx", monkeypatch):
        yield


@pytest.mark.parametrize(
    "sizes",
    [{"hidden_size": 4096, "mamba_num_heads": 24}, {"hidden_size": 512, "intermediate_size": 4112}, {}],
    ids=["hidden", "intermediate", "short"],
)
def test_rows_have_the_bits_of_small_steps(amx: None, sizes: dict[str, int]) -> None:
    """With tiles, a unit of work has several panels of long rows, and its last block of rows begins in the one before
    it. Of the last mixer, some outputs are for the last tokens of prompts only."""
    config = tiny_config("-M", **sizes)

    def answered(rows: int) -> dict[str, list[tuple[int | None, float | None]]]:
        options = DecoderOptions(
            dtype=torch.bfloat16, max_seqs=4, max_len=160, page_size=4, native="on", max_batched_tokens=rows
        )
        runner = DecoderRunner(config, options, random_weights(config))
        prompts = [[3 + (7 * i + count) % 90 for i in range(count)] for count in (129, 3, 61)]
        params = greedy_params(3, ignore_eos=True, logprobs=0)
        events = run(runner, *(request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)))
        return {name: [(event.token_id, event.logprob) for event in of] for name, of in events.items()}

    assert answered(256) == answered(24)
