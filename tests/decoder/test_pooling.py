"""The pooled hidden states of a prompt equal those of a request for a single token, however the prompt is computed and
whatever follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_decoder import greedy_params, make_runner, random_weights, request, run, tiny_config, tokens

from decoder.request import DecoderRequest, Pooled, TokenEvent
from decoder.runner import DecoderRunner

CONFIG = tiny_config("M-*E")
WEIGHTS = dict(random_weights(CONFIG))
PROMPT = [token * 5 % 97 for token in range(23)]


def make(**options: Any) -> DecoderRunner:
    return make_runner(CONFIG, WEIGHTS, page_size=4, **options)


def asked(name: str, count: int, **changes: Any) -> DecoderRequest:
    return request(name, PROMPT, greedy_params(count, prompt_logprobs=1), pooled=True, **changes)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], Pooled, int]:
    """Ten tokens, and the pooled states of a request with one output token."""
    runner = make()
    (event,) = run(runner, asked("a", 1))["a"]
    assert event.pooled is not None
    return tokens(run(runner, request("b", PROMPT, greedy_params(10)))["b"]), event.pooled, len(event.prompt_scores)


def check(events: list[TokenEvent], expected: tuple[list[int], Pooled, int]) -> None:
    answer, pooled, scores = expected
    assert tokens(events) == answer
    first, *others = events
    assert first.pooled is not None and len(first.prompt_scores) == scores == len(PROMPT) - 1
    torch.testing.assert_close(first.pooled.last, pooled.last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first.pooled.mean, pooled.mean, rtol=1e-4, atol=1e-4)
    assert all(event.pooled is None and not event.prompt_scores for event in others)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_chunk": 5}, id="chunks"),
        pytest.param({"max_chunk": 5, "preempt": 3}, id="swapped"),
        pytest.param({"max_chunk": 9, "preempt": 5, "host_bytes": 0, "state_cache": "none"}, id="recomputed"),
        pytest.param({"overlap": "on", "native": "off"}, id="overlap"),
        pytest.param({"speculative": "ngram", "draft_policy": "fixed"}, id="drafts"),
    ],
)
def test_a_request_that_goes_on_is_told_once(options: dict[str, Any], expected: tuple[list[int], Pooled, int]) -> None:
    every = options.pop("preempt", 0)
    runner = make(**({"host_bytes": 10**9} | options))
    found = run(runner, asked("a", 10), request("other", [4, 5], greedy_params(20)), preempt_every=every)
    check(found["a"], expected)
    assert len(tokens(found["other"])) == 20
    assert (runner.stats()["preemptions"] > 2) == (every > 0)
    assert (runner.stats()["recomputes"] > 0) == ("host_bytes" in options)
    assert not runner.answers.reading, "nothing more is to be read"


@pytest.mark.parametrize("chunk", [5, 23, 24, 64])
def test_output_that_exists_already_is_no_part_of_a_prompt(chunk: int, expected: tuple[list[int], Pooled, int]) -> None:
    answer, pooled, scores = expected
    events = run(make(max_chunk=chunk), asked("a", 10, output_ids=answer[:4]))["a"]
    check(events, (answer[4:], pooled, scores))


def test_drafts_are_no_part_of_a_prompt() -> None:
    """Although its last chunk is one token, after a repetition that drafts would continue."""
    item = request("a", [20, 21, 22] * 3, greedy_params(10), pooled=True)
    plain = run(make(), item)["a"]
    drafted = run(make(speculative="ngram", draft_policy="fixed", max_chunk=8), item)["a"]
    assert tokens(drafted) == tokens(plain)
    mine, expected = drafted[0].pooled, plain[0].pooled
    assert mine is not None and expected is not None
    torch.testing.assert_close(mine.last, expected.last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.mean, expected.mean, rtol=1e-4, atol=1e-4)


def test_every_sample_of_a_prompt_is_told(expected: tuple[list[int], Pooled, int]) -> None:
    runner = make()
    group = [asked(name, 10) for name in "abc"]
    runner.add(*group)
    found = run(runner)
    assert runner.stats()["forks"] == 2
    for name, events in found.items():
        scores = expected[2] if name == "a" else 0  # these are of the prompt that all share
        assert len(events[0].prompt_scores) == scores
        check([events[0]._replace(prompt_scores=found["a"][0].prompt_scores), *events[1:]], expected)


def test_samples_that_ask_for_different_things_are_no_group() -> None:
    runner = make()
    for other in (
        replace(asked("b", 3), pooled=False),
        replace(asked("b", 3), salt=b"else"),
        replace(asked("b", 3), prompt_ids=[1, 2]),
        replace(asked("b", 3), output_ids=[1]),
    ):
        with pytest.raises(AssertionError):
            runner.add(asked("a", 3), other)
        runner.check_integrity()
        assert not runner.has_work
