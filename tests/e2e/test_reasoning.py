"""Reasoning with a model of random weights, whose prompt opens it: a budget, streams, samples, continued answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reasoner import CLOSE, OPEN, make_reasoner

import saccade


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[saccade.LocalClient]:
    path = make_reasoner(tmp_path_factory.mktemp("reasoner") / "tiny")
    with saccade.LocalClient(path, dtype="float32", threads=1, max_seqs=4, max_len=300) as client:
        yield client


@pytest.mark.parametrize("limit", [0, 3])
def test_the_budget_ends_the_reasoning_in_every_form_of_an_answer(reasoner: saccade.LocalClient, limit: int) -> None:
    options = {"max_tokens": 12, "max_reasoning_tokens": limit, "temperature": 1.0, "seed": 5, "n": 2}
    answer = reasoner.generate("a<think>", raw=True, ignore_eos=True, **options)  # type: ignore[arg-type]
    for sample in answer.samples:
        closed = sample.token_ids.index(CLOSE)
        assert closed == sample.usage.reasoning_tokens <= limit
        assert len(sample.token_ids) == 12 == sample.usage.completion_tokens
    with reasoner.stream("a<think>", raw=True, ignore_eos=True, **options) as stream:  # type: ignore[arg-type]
        deltas = list(stream)
        assert stream.final() == answer
    for sample in answer.samples:
        mine = [delta for delta in deltas if delta.index == sample.index]
        assert "".join(delta.reasoning for delta in mine) == sample.reasoning
        assert "".join(delta.text for delta in mine) == sample.text


def test_an_answer_is_continued_within_its_reasoning(reasoner: saccade.LocalClient) -> None:
    options = {"raw": True, "max_tokens": 12, "max_reasoning_tokens": 4, "temperature": 1.0, "seed": 6}
    whole = reasoner.generate("a<think>", ignore_eos=True, **options)  # type: ignore[arg-type]
    for cut in (1, 4, 5, 9):
        again = reasoner.generate(
            "a<think>", ignore_eos=True, continued_token_ids=whole.token_ids[:cut], **options,  # type: ignore[arg-type]
        )  # fmt: skip
        assert whole.token_ids[cut:] == again.token_ids
        assert whole.text.endswith(again.text) and again.usage.reasoning_tokens == whole.usage.reasoning_tokens


def test_without_a_budget_the_model_may_open_reasoning_itself(reasoner: saccade.LocalClient) -> None:
    answer = reasoner.generate("a", raw=True, max_tokens=6, ignore_eos=True, logit_bias={OPEN: 1e9}, temperature=0)
    assert answer.token_ids == [OPEN] * 6 and answer.text == "" and answer.usage.reasoning_tokens == 5
    answer = reasoner.generate(
        "a", raw=True, max_tokens=6, ignore_eos=True, logit_bias={OPEN: 1e9}, temperature=0, max_reasoning_tokens=2
    )
    assert answer.token_ids == [OPEN, OPEN, OPEN, CLOSE, OPEN, OPEN] and answer.usage.reasoning_tokens == 2
