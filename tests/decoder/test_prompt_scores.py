"""Scores of a prompt's own tokens, compared with the logits of transformers' model."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tiny_decoder import image, make_runner, oracle, preempt, request, run, tiny_config, weights_of

from decoder.sampling import SamplingParams

CONFIG = tiny_config("M-*EM")
MODEL = oracle(CONFIG)
PROMPT = [7 * i % 97 for i in range(40)]


def scores(**options: Any) -> Any:
    runner = make_runner(CONFIG, weights_of(MODEL, CONFIG), **options)
    params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2)
    for name in ("first", "again"):  # all but one token of the second prompt could come from the cache
        events = run(runner, request(name, PROMPT, params))[name]
    assert all(not event.prompt_scores for event in events[1:])
    assert runner.stats()["cache_hits"] == 0
    return events[0].prompt_scores


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole"),
        pytest.param({"max_chunk": 7}, id="chunk-7"),
        pytest.param({"max_chunk": 1, "graphs": "on"}, id="chunk-1-graphs"),
        pytest.param({"max_batched_tokens": 9}, id="steps-of-9"),
    ],
)
def test_scores_are_those_of_the_oracle(options: dict[str, Any]) -> None:
    found = scores(**options)
    with torch.no_grad():
        expected = torch.log_softmax(MODEL(torch.tensor([PROMPT])).logits[0].double(), -1)
    assert [score.position for score in found] == list(range(1, 40))
    for score in found:
        row = expected[score.position - 1]
        assert score.token == PROMPT[score.position]
        assert score.logprob == pytest.approx(float(row[score.token]), abs=1e-4)
        assert [token for token, _ in score.top] == row.topk(2)[1].tolist()


def test_scores_of_a_long_prompt_cross_as_arrays() -> None:
    """As an object for each token, those of 32,768 tokens would stop the engine's thread for as long as many steps."""
    found = scores()
    sent = pickle.dumps(found)
    assert len(sent) < len(found) * (2 * 8 + 4 + 2 * (8 + 4)) + 600
    other = pickle.loads(sent)
    assert list(other) == list(found) == [found[at] for at in range(-len(found), 0)] and found[3:5] == list(found)[3:5]
    with pytest.raises(IndexError):
        found[len(found)]


def test_a_prompt_that_is_read_again_is_scored_once() -> None:
    plain = scores()
    runner = make_runner(CONFIG, weights_of(MODEL, CONFIG), max_chunk=9, host_bytes=0)
    runner.add(request("a", PROMPT, SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2)))
    for _ in range(3):
        runner.step()
    preempt(runner, "a")
    events = run(runner)["a"]
    assert runner.stats()["recomputes"] == 1
    assert [score.position for score in events[0].prompt_scores] == [score.position for score in plain]
    for one, other in zip(events[0].prompt_scores, plain, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_rows_of_images_have_none_and_samples_share_one_reading() -> None:
    runner = make_runner(CONFIG, weights_of(MODEL, CONFIG))
    params = SamplingParams(max_tokens=2, seed=1, prompt_logprobs=0)
    rows = torch.randn(6, CONFIG.hidden_size)
    group = [request(f"s{i}", PROMPT, params, [image(10, rows)], sample_index=i) for i in range(3)]
    runner.add(*group)
    events = run(runner)
    told = events["s0"][0].prompt_scores
    assert [score.position for score in told] == [*range(1, 10), *range(16, 40)]
    assert all(score.top == () for score in told)
    assert not any(event.prompt_scores for name in ("s1", "s2") for event in events[name])
