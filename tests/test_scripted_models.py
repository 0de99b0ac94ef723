"""Checkpoints whose text and whose head's mistakes are known, in small: their answers, and the accepted drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import saccade
from benchmarks.qwen_model import TEXT
from benchmarks.scripted_models import NEMOTRON_H, RATES, Script, nemotron_model, qwen_model
from benchmarks.speculation_rates import NGRAM_TEXTS, asks

SCRIPT = Script(group=8, groups=2, long=40)
SMALL_HYBRID = NEMOTRON_H | {
    "vocab_size": 300, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 64, "ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
    "layers_block_type": ["linear_attention", "full_attention", "mlp"],
}  # fmt: skip
SMALL_DELTA = TEXT | {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [2, 1, 1]}, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, Callable[[Path], Path]] = {
    "nemotron_h": lambda folder: nemotron_model(folder, SMALL_HYBRID, SCRIPT),
    "qwen3_5": lambda folder: qwen_model(folder, SMALL_DELTA, SCRIPT),
}
BASE: dict[str, Any] = {"max_seqs": 2, "max_len": 128, "threads": 1, "dtype": "bfloat16", "draft_policy": "fixed"}
PROMPT, TOKENS = 9, 30


@pytest.mark.parametrize("name", MODELS)
def test_text_and_acceptance_are_those_of_the_script(name: str, tmp_path: Path) -> None:
    path = MODELS[name](tmp_path)
    errs = SCRIPT.errs(300)
    with saccade.LocalClient(path, speculative="mtp", draft_tokens=1, **BASE) as client:
        for rate in RATES:
            text = f"rate {rate}"
            whole = SCRIPT.text(text, 0, PROMPT + TOKENS)
            before = client._service.stats()["decoder"]
            answer = client.generate(whole[:PROMPT], temperature=0, max_tokens=TOKENS, ignore_eos=True, raw=True)
            assert list(answer.token_ids) == whole[PROMPT:]
            after = client._service.stats()["decoder"]
            drafted, accepted = (after[key] - before[key] for key in ("drafted_1", "accepted_1"))
            # A draft of the token behind each one that begins a step: whether it is right is known.
            at, expected = PROMPT, []
            while at < PROMPT + TOKENS - 1:
                expected.append(not errs[whole[at]])
                at += 1 + expected[-1]
            assert abs(drafted - len(expected)) <= 1 and abs(accepted - sum(expected)) <= 1
            assert rate not in (0.0, 1.0) or accepted == rate * drafted


def test_of_the_texts_one_repeats_one_has_two_ways_and_one_does_not_repeat(tmp_path: Path) -> None:
    path = MODELS["nemotron_h"](tmp_path)
    accepted = {}
    with saccade.LocalClient(path, speculative="ngram", draft_tokens=1, **BASE) as client:
        for text in NGRAM_TEXTS:
            before = client._service.stats()["decoder"]
            for seed in range(4):
                found = client.generate(
                    SCRIPT.text(text, seed % 2, 16), temperature=float(text == "branching"), seed=seed, max_tokens=20,
                    ignore_eos=True, raw=True,
                )  # fmt: skip
                ids = [*SCRIPT.text(text, seed % 2, 16)[-1:], *found.token_ids]
                follow = SCRIPT.next_tokens(300).tolist()
                assert all(then in follow[now] for now, then in zip(ids, ids[1:]))
            after = client._service.stats()["decoder"]
            accepted[text] = tuple(after[key] - before[key] for key in ("drafted_1", "accepted_1"))
    assert accepted["repeating"][0] == accepted["repeating"][1] > 0
    drafted, right = accepted["branching"]
    assert 0.2 * drafted < right < 0.8 * drafted
    assert accepted["rate 1.0"] == (0, 0)


def test_requests_of_the_benchmark_ask_for_the_script() -> None:
    script = Script()
    assert len(asks(script, "repeating", 8, 4)) == 8
    starts = {tuple(script.text(text, request, 40)) for text in (*NGRAM_TEXTS, "rate 0.0") for request in range(8)}
    assert len(starts) == 32, "no two requests have the same prompt"
