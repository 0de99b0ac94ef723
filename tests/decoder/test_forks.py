"""Samples of one prompt: computed once, pages shared, each equal to a separate request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_decoder import FakeSource, image, make_runner, random_weights, request, run, tiny_config, tokens

from decoder.layers.descriptions import Attention
from decoder.layers.spec import Layer
from decoder.pace import DeadlineError
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams

PATTERNS = ["M-*EM*", "MM", "**"]
CONFIGS = {pattern: tiny_config(pattern, num_nextn_predict_layers=1) for pattern in PATTERNS}
[(_name, _attention)] = CONFIGS["**"].layers[0].mixers
assert isinstance(_attention, Attention)
_windowed = Layer(((_name, replace(_attention, window=9, head_gate=True)),))
CONFIGS["**"] = replace(CONFIGS["**"], layers=(_windowed, CONFIGS["**"].layers[1]))
WEIGHTS = {pattern: dict(random_weights(config)) for pattern, config in CONFIGS.items()}
SAMPLING = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=1)
ROWS = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))


def samples(count: int, length: int = 29, *, images: bool = True, **changes: Any) -> list[DecoderRequest]:
    made = []
    for index in range(count):
        spans = [image(4, ROWS)] if images else []
        prompt = [index_ * 7 % 97 for index_ in range(length)]
        made.append(request(f"s{index}", prompt, SAMPLING, spans, sample_index=index, **changes))
    return made


def drive(runner: DecoderRunner, group: list[DecoderRequest], **rest: Any) -> dict[str, Any]:
    runner.add(*group)
    return run(runner, **rest)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("length", [29, 32], ids=["mid-page", "whole-pages"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"state_cache": "none"}, id="no-cache"),
        pytest.param({"state_cache": "all", "page_size": 4, "state_block": 4, "max_chunk": 7}, id="all-chunk-7"),
        pytest.param({"graphs": "on"}, id="graphs"),
        pytest.param({"speculative": "ngram", "draft_policy": "fixed"}, id="replay"),
        pytest.param({"speculative": "ngram", "draft_policy": "fixed", "spec_state": "slots"}, id="slots"),
        pytest.param({"speculative": "mtp", "draft_policy": "fixed", "graphs": "on"}, id="mtp-graphs"),
        pytest.param({"speculative": "mtp", "draft_policy": "fixed", "spec_state": "slots"}, id="mtp-slots"),
    ],
)
def test_forked_equals_alone(pattern: str, length: int, options: dict[str, Any]) -> None:
    plain = make_runner(CONFIGS[pattern], WEIGHTS[pattern], state_cache="none")
    alone = {}
    for sample in samples(5, length):
        alone |= run(plain, sample)
    runner = make_runner(CONFIGS[pattern], WEIGHTS[pattern], **options)
    found = drive(runner, samples(5, length))
    assert {name: tokens(events) for name, events in found.items()} == {n: tokens(e) for n, e in alone.items()}
    for name, events in found.items():
        assert [e.logprob for e in events] == pytest.approx([e.logprob for e in alone[name]], abs=1e-4)
    stats = runner.stats()
    assert stats["forks"] == 4 and stats["fork_misses"] == 0
    if "speculative" not in options:
        assert stats["batched_tokens"] == length + 5 * 11, "the prompt was prefilled more than once"
    if options.get("state_cache") == "none":
        assert stats["free_blocks"] == stats["total_blocks"]


@pytest.mark.parametrize("spec_state", ["replay", "slots"])
def test_a_row_that_ends_the_prompt_has_no_drafts(spec_state: str) -> None:
    """The last chunk is one token, after a repetition that drafts would continue."""
    plain = make_runner(CONFIGS["M-*EM*"], WEIGHTS["M-*EM*"], state_cache="none")
    group = [replace(sample, prompt_ids=[20, 21, 22] * 3) for sample in samples(3, images=False)]
    alone = {name: tokens(events) for sample in group for name, events in run(plain, sample).items()}
    options: dict[str, Any] = {"speculative": "ngram", "draft_policy": "fixed", "max_chunk": 8}
    runner = make_runner(CONFIGS["M-*EM*"], WEIGHTS["M-*EM*"], spec_state=spec_state, **options)
    assert {name: tokens(events) for name, events in drive(runner, group).items()} == alone
    assert runner.stats()["forks"] == 2


def test_pages_are_shared_and_the_last_one_is_not() -> None:
    runner = make_runner(CONFIGS["**"], WEIGHTS["**"], page_size=4)
    runner.add(*samples(3, 30, images=False))
    runner.step()
    first, second, third = (sequence.held.pages for sequence in runner.scheduler.running)
    assert first[:7] == second[:7] == third[:7] and len({first[7], second[7], third[7]}) == 3
    runner.check_integrity()
    run(runner)


@pytest.mark.parametrize("batch_slots", [1, 2])
def test_those_without_a_batch_slot_read_the_prompt_themselves(batch_slots: int) -> None:
    pattern = "M-*EM*"
    plain = make_runner(CONFIGS[pattern], WEIGHTS[pattern])
    alone = {name: tokens(e) for s in samples(4) for name, e in run(plain, s).items()}
    runner = make_runner(CONFIGS[pattern], WEIGHTS[pattern], max_seqs=batch_slots)
    found = drive(runner, samples(4))
    assert {name: tokens(events) for name, events in found.items()} == alone
    assert runner.stats()["fork_misses"] == 4 - batch_slots and runner.stats()["forks"] == batch_slots - 1


@pytest.mark.parametrize("host_bytes", [pytest.param(0, id="recompute"), pytest.param(10**9, id="swap")])
@pytest.mark.parametrize("images", [False, True])
def test_forked_and_preempted(host_bytes: int, images: bool) -> None:
    pattern = "M-*EM*"
    plain = make_runner(CONFIGS[pattern], WEIGHTS[pattern])
    alone = {name: tokens(e) for s in samples(4, images=images) for name, e in run(plain, s).items()}
    runner = make_runner(CONFIGS[pattern], WEIGHTS[pattern], host_bytes=host_bytes, max_chunk=10)
    found = drive(runner, samples(4, images=images), preempt_every=6)
    assert {name: tokens(events) for name, events in found.items()} == alone
    assert runner.stats()["preemptions"] > 1


@pytest.mark.parametrize("when", ["waiting", "reading", "forked"])
@pytest.mark.parametrize("who", ["s0", "s1"])
def test_one_that_leaves_takes_nobody_along(when: str, who: str) -> None:
    pattern = "M-*EM*"
    plain = make_runner(CONFIGS[pattern], WEIGHTS[pattern])
    alone = {name: tokens(e) for s in samples(3) for name, e in run(plain, s).items()}
    runner = make_runner(CONFIGS[pattern], WEIGHTS[pattern], max_chunk=10)
    group = samples(3)
    runner.add(*group)
    events: dict[str, list[Any]] = {name: [] for name in alone}
    for _ in range({"waiting": 0, "reading": 1, "forked": 4}[when]):
        for event in runner.step():
            events[event.request_id].append(event)
    assert runner.abort(who)
    for name, more in run(runner).items():
        events[name] += more
    for name in alone.keys() - {who}:
        assert tokens(events[name]) == alone[name]
    for sample in group:
        for span in sample.spans:
            assert isinstance(span, FakeSource) and span.releases == 1


def test_an_image_that_fails_for_the_leader_ends_its_own_sample() -> None:
    pattern = "M-*EM*"
    runner = make_runner(CONFIGS[pattern], WEIGHTS[pattern])
    group = samples(3)
    (broken,) = group[0].spans
    assert isinstance(broken, FakeSource)
    broken.ready, broken.error = False, OSError("gone")
    group[0] = replace(group[0], spans=(broken,))
    found = drive(runner, group)
    assert found["s0"][-1].finish_reason == "error"
    assert all(len(tokens(found[name])) == 12 for name in ("s1", "s2"))


def changed(index: int, **changes: Any) -> list[DecoderRequest]:
    """Three samples, one of which differs."""
    group = samples(3, 19, images=False)
    group[index] = replace(group[index], **changes)
    return group


@pytest.mark.parametrize(
    ("group", "message"),
    [
        pytest.param(samples(3, 29, images=False), "max_len 20", id="all-too-long"),
        pytest.param(changed(2, request_id="s1"), "two samples of one prompt have the id 's1'", id="a-b-b"),
        pytest.param(changed(1, request_id="s0"), "two samples of one prompt have the id 's0'", id="a-a-b"),
        pytest.param(changed(2, request_id="here"), "a request with the id 'here' exists already", id="a-b-known"),
        pytest.param(changed(0, request_id="here"), "a request with the id 'here' exists already", id="known-b-c"),
        pytest.param(changed(2, eos_token_ids=frozenset({97})), "eos_token_ids: token id 97", id="eos"),
        pytest.param(
            changed(1, sampling=SamplingParams(stop_token_ids=frozenset({3, 97}))),
            "stop_token_ids: token id 97",
            id="stop",
        ),
        pytest.param(changed(2, sampling=SamplingParams(logit_bias={97: 1.0})), "logit_bias: token id 97", id="bias"),
        pytest.param(changed(0, timeout=0.0), "deadline", id="deadline"),
    ],
)
def test_a_group_that_cannot_be_served_leaves_nothing(group: list[DecoderRequest], message: str) -> None:
    """It does not affect other requests, and its ids can be used again at once."""
    runner = make_runner(CONFIGS["MM"], WEIGHTS["MM"], max_len=20)
    run(runner, request("first", [1, 2, 3]))  # so that times are known
    runner.add(request("here", [1, 2, 3]))
    with pytest.raises((ValueError, DeadlineError), match=message):
        runner.add(*group)
    assert [sequence.request_id for sequence in runner.scheduler.queues] == ["here"] == list(runner.answers.sequences)
    runner.check_integrity()
    short = samples(3, 9, images=False)
    runner.add(*short)
    found = run(runner)
    assert found.keys() == {"here", "s0", "s1", "s2"} and runner.stats()["forks"] == 2
    assert all(len(tokens(found[sample.request_id])) == 11 for sample in short)
