"""Launching a step before the previous one is read changes only when the host gets the results."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from constrained import END, KINDS, Machine, constraints
from host_reads import HostReads
from tiny_decoder import (
    FakeSource,
    greedy_params,
    image,
    make_runner,
    preempt,
    random_weights,
    request,
    run,
    spoil,
    state_content,
    tiny_config,
    tokens,
)

from decoder.config import DecoderOptions
from decoder.flight import accepted_drafts
from decoder.loops import WAITS, OverlappedLoop
from decoder.pace import DeadlineError
from decoder.request import DecoderRequest, TokenEvent
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from decoder.sequence import UNREAD
from decoder.step import Row

PATTERNS = ("M-*EM*", "MM", "*E*-")
CONFIGS = {pattern: tiny_config(pattern) for pattern in PATTERNS}
WEIGHTS = {pattern: dict(random_weights(config)) for pattern, config in CONFIGS.items()}
PATTERN = PATTERNS[0]
ENDS = frozenset({END})
IMAGE = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))


def make(overlap: str = "on", pattern: str = PATTERN, **options: Any) -> DecoderRunner:
    return make_runner(CONFIGS[pattern], WEIGHTS[pattern], overlap=overlap, **({"page_size": 4} | options))


def params(index: int) -> SamplingParams:
    """All kinds of parameters, most with tokens that end the answer early."""
    ends = frozenset(range(index, 97, 9))
    return (
        greedy_params(18, stop_token_ids=ends, logprobs=2),
        SamplingParams(max_tokens=18, seed=index, stop_token_ids=ends),
        SamplingParams(max_tokens=18, seed=index, temperature=0.8, top_p=0.9, top_k=30, min_tokens=6),
        SamplingParams(max_tokens=18, seed=index, repetition_penalty=1.3, frequency_penalty=0.4, stop_token_ids=ends),
        greedy_params(18, presence_penalty=0.7, frequency_penalty=0.5, logit_bias={3: 1.0}, logprobs=0),
        SamplingParams(max_tokens=1 + index, temperature=0.0, prompt_logprobs=1),
    )[index % 6]


def workload(count: int = 14) -> list[DecoderRequest]:
    draw, made = random.Random(3), []
    shared = [draw.randrange(97) for _ in range(13)]
    for index in range(count):
        prompt = [*shared[: draw.choice([0, 5, 13])], *(draw.randrange(97) for _ in range(draw.choice([1, 9, 24])))]
        spans = [image(2, IMAGE)] if len(prompt) > 12 and index % 2 else []
        eos = frozenset({index, 40})
        chosen, pooled = params(index), index == 8
        if pooled:
            chosen = greedy_params(1)
        made.append(request(f"r{index}", prompt, chosen, spans, eos_token_ids=eos, pooled=pooled))
    return made


def told(events: dict[str, list[TokenEvent]]) -> dict[str, list[Any]]:
    """The events of each request, in comparable form."""
    return {
        name: [
            (
                e.token_id, e.finish_reason, e.stop_token, e.cached_tokens, len(e.prompt_scores), e.pooled is None,
                None if e.logprob is None else pytest.approx(e.logprob, abs=1e-4), [token for token, _ in e.top],
            )
            for e in of
        ]
        for name, of in events.items()
    }  # fmt: skip


def cached(runner: DecoderRunner) -> dict[bytes, tuple[int, torch.Tensor]]:
    """Key, number of tokens and content of every kept state."""
    assert runner.cache is not None
    return {c.key: (c.tokens, state_content(runner, c.slot)) for c in runner.cache.order}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"native": "off", "state_cache": "all", "state_block": 20, "max_chunk": 7}, id="chunks-all"),
        pytest.param({"graphs": "on", "state_cache": "align", "state_block": 20}, id="graphs-align"),
        pytest.param({"max_seqs": 2, "max_batched_tokens": 9, "state_cache": "none"}, id="crowded"),
        pytest.param({"max_seqs": 5, "max_batched_tokens": 3}, id="fewer-tokens-than-rows"),
    ],
)
def test_events_are_those_of_a_plain_run(pattern: str, options: dict[str, Any]) -> None:
    found = []
    for overlap in ("off", "on"):
        runner = make(overlap, pattern, **options)
        spoil(runner)
        found.append(told(run(runner, *workload())))
        stats = runner.stats()
        assert (stats["overlapped_steps"] > 5) == (overlap == "on")
        assert stats["used_slots"] == stats["used_pages"] == 0
    assert found[0] == found[1]
    reasons = {of[-1][1:3] for of in found[1].values()}
    assert {reason for reason, _ in reasons} == {"stop", "length"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"state_cache": "auto"}, id="auto"),
        pytest.param({"state_cache": "auto", "graphs": "on", "max_chunk": 5}, id="auto-graphs"),
        pytest.param({"state_cache": "align", "state_block": 4}, id="align"),
        pytest.param({"state_cache": "all", "state_block": 4}, id="all"),
    ],
)
def test_what_is_kept_is_what_a_plain_run_keeps(options: dict[str, Any]) -> None:
    """Keys and numbers: no state after an end token that is drawn while the next step is being prepared. One request
    can only draw end tokens, from the first one on, and must not end by one before the sixth."""
    forced = greedy_params(9, min_tokens=5, stop_token_ids=frozenset(range(97)))
    kept = []
    for overlap in ("off", "on"):
        runner = make(overlap, memory_bytes=2**22, **options)
        found = run(runner, *workload(), request("forced", [50, 51, 52], forced))
        assert tokens(found["forced"])[:5] == [0] * 5 and len(tokens(found["forced"])) == 6
        kept.append(cached(runner))
    assert kept[0].keys() == kept[1].keys() and len(kept[0]) > 10
    for key, (count, numbers) in kept[0].items():
        assert kept[1][key][0] == count
        torch.testing.assert_close(kept[1][key][1], numbers, rtol=1e-4, atol=1e-4)


def test_what_is_kept_of_constrained_answers_is_what_a_plain_run_keeps() -> None:
    """Some must end before `min_tokens` and under `ignore_eos`, some fail, others end where they may. No state is
    advanced by an end token, and later requests continue from what is kept."""
    found, kept = [], []
    early: dict[str, Any] = {"min_tokens": 15, "ignore_eos": True}
    for overlap in ("off", "on"):
        runner = make(overlap, state_cache="auto")
        items = [
            request(
                f"c{index}", [50 + index, *range(20, 29)],
                SamplingParams(max_tokens=20, seed=index, frequency_penalty=0.3, **(early if index % 2 else {})),
                constraint=constraints(kind), eos_token_ids=ENDS,
            )
            for index, kind in enumerate([*KINDS, "chain", "both"])
        ]  # fmt: skip
        chains = [
            request(f"e{index}", [60 + index, *range(20, 29)], greedy_params(20, **changes), eos_token_ids=ENDS,
                    constraint=Machine([{10: 1}, {11: 2}, {12: 3}, {}], frozenset({3})))
            for index, changes in enumerate([early, {"min_tokens": 9}, {"ignore_eos": True}, {}])
        ]  # fmt: skip
        events = run(runner, *items, *chains, *workload(4))
        assert all(tokens(events[item.request_id]) == [10, 11, 12, END] for item in chains)
        after = [request(f"after {item.request_id}", [*item.prompt_ids, *tokens(events[item.request_id]), 70, 71],
                         greedy_params(3)) for item in (*items, *chains)]  # fmt: skip
        kept.append(cached(runner))
        found.append(told(events) | told(run(runner, *after)))
        assert (runner.stats()["overlapped_steps"] > 20) == (overlap == "on")
    assert found[0] == found[1] and kept[0].keys() == kept[1].keys()
    for key, (count, numbers) in kept[0].items():
        assert kept[1][key][0] == count
        torch.testing.assert_close(kept[1][key][1], numbers, rtol=1e-4, atol=1e-4)


def ending(cut: int) -> tuple[list[int], SamplingParams]:
    """The unconstrained answer to a prompt, and parameters with which it ends at its token number `cut`."""
    free = tokens(run(make("off"), request("a", range(9), greedy_params(12)))["a"])
    return free, greedy_params(12, stop_token_ids=frozenset({free[cut]}))


@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_an_answer_that_ends_in_the_step_before_goes_on_from_its_end(cut: int) -> None:
    free, stopping = ending(cut)
    end = free.index(free[cut])
    runner = make()
    answer = tokens(run(runner, request("a", range(9), stopping))["a"])
    assert answer == free[: end + 1]
    following = [*range(9), *answer, 60, 61, 62]
    plain = make("off")
    run(plain, request("a", range(9), stopping))
    found, expected = (told(run(of, request("b", following, greedy_params(3)))) for of in (runner, plain))
    assert found == expected
    assert found["b"][0][3] == (9 + end if cut > 3 else 8)


def test_what_comes_next_into_the_memory_of_one_that_ended_is_unharmed() -> None:
    """With one batch slot, the next request gets slot and pages while the row after the end may still be running."""
    _, stopping = ending(3)
    alone = told(run(make("off"), request("b", range(30, 55), greedy_params(9, frequency_penalty=0.5))))
    runner = make(max_seqs=1, state_cache="none")
    found = told(
        run(
            runner,
            request("a", range(9), stopping),
            request("b", range(30, 55), greedy_params(9, frequency_penalty=0.5)),
        )
    )
    assert found["b"] == alone["b"]


# -- the host waits for nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"graphs": "on"}], ids=["eager", "graphs"])
def test_a_launch_reads_nothing_of_the_device(options: dict[str, Any]) -> None:
    """Prompts, images, samples of one prompt, every way of drawing, ends, log-probabilities, checkpoints, hits."""
    runner = make(native="off", max_chunk=9, **options)
    assert isinstance(runner.loop, OverlappedLoop)
    reads, launch = HostReads(), runner.loop.launch

    def watched() -> Any:
        with reads:
            return launch()

    runner.loop.launch = watched  # type: ignore[method-assign]
    asked = [item for item in workload() if item.sampling.prompt_logprobs is None and not item.pooled]
    for _ in range(2):
        run(runner, *asked)
        runner.add(*(request(f"s{i}", range(40, 51), greedy_params(4), sample_index=i) for i in range(3)))
        run(runner)
    assert runner.stats()["overlapped_steps"] > 30 and runner.stats()["forks"] == 4
    assert reads.found == set()


def test_a_step_that_is_read_at_once_is_seen_to_read() -> None:
    """The check above can fail: it finds the reads of plain drawing and of scores of a prompt."""
    runner = make("off", native="off")
    runner.add(request("a", range(9), SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0)))
    with HostReads() as reads:
        runner.step()
    assert any("decoder/sampler.py" in line and "tolist" in line for line in reads.found)
    assert any("decoder/prompt_scores.py" in line for line in reads.found)
    assert any("a copy from ordinary memory" in line for line in reads.found)


# -- what has to wait does, and is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize("reason", WAITS)
def test_what_waits_is_counted(reason: str) -> None:
    options: dict[str, Any] = {}
    item = request("a", range(9), greedy_params(20))
    if reason == "drafts":
        options = {"speculative": "ngram"}
    elif reason == "checkpoint":
        options = {"state_cache": "align", "state_block": 8}
    elif reason == "pooled":
        item = request("a", range(9), greedy_params(1), pooled=True)
    elif reason == "prompt_logprobs":
        options, item = {"max_chunk": 4}, request("a", range(9), greedy_params(20, prompt_logprobs=1))
    plain = make("off", **options)
    expected = told(run(plain, item))
    runner = make(**options)
    found = told(run(runner, item, preempt_every=5 if reason == "swap" else 0))
    assert found == expected
    waited = {name: runner.stats()[f"waited_{name}"] for name in WAITS}
    assert [name for name, count in waited.items() if count] == [reason]
    assert not any(plain.stats()[f"waited_{name}"] for name in WAITS)
    assert (runner.stats()["overlapped_steps"] > 10) == (reason in ("checkpoint", "prompt_logprobs", "swap"))


def test_overlap_with_drafts_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    make(speculative="ngram")
    assert "no effect with speculative 'ngram'" in caplog.text
    with pytest.raises(ValueError, match="overlap 'maybe' is not one of auto, on, off"):
        DecoderOptions(overlap="maybe")
    assert not DecoderOptions().overlap_on and DecoderOptions(device="cuda").overlap_on
    assert not DecoderOptions(device="cuda", overlap="off").overlap_on


# -- while a step is in flight -----------------------------------------------------------------------------------------


def test_a_step_in_flight_is_work() -> None:
    runner = make()
    runner.add(request("a", range(9), greedy_params(2)))
    assert runner.step() == []
    (sequence,) = runner.scheduler.running
    assert sequence.tokens == [*range(9), UNREAD] and sequence.known == 9
    assert runner.has_work and runner.runnable
    runner.check_integrity()
    assert [event.finish_reason for event in runner.step()] == [None]
    assert runner.runnable
    assert [event.finish_reason for event in runner.step()] == ["length"]
    assert not runner.has_work and not runner.runnable
    assert runner.stats()["batched_tokens"] == 10, "a token behind the last one was computed"


@pytest.mark.parametrize("after", range(1, 9))
@pytest.mark.parametrize("speculative", ["none", "ngram"])
def test_an_abort_in_flight_takes_nobody_along(after: int, speculative: str) -> None:
    """An abort at any time does not change the other requests' results, and the request id can be reused at once."""
    items: list[Callable[[], DecoderRequest]] = [
        lambda: request("a", range(20), greedy_params(8), [image(4, IMAGE)]),
        lambda: request("b", range(30, 35), SamplingParams(max_tokens=9, seed=3, frequency_penalty=0.5)),
        lambda: request("c", range(20), greedy_params(8, stop_token_ids=frozenset(range(0, 97, 7)))),
    ]
    options: dict[str, Any] = {"max_chunk": 6, "speculative": speculative, "draft_policy": "fixed"}
    alone = {make_().request_id: told(run(make("off"), make_()))[make_().request_id] for make_ in items}
    for index, gone in enumerate("abc"):
        runner = make(**options)
        made = [item() for item in items]
        for item in made:
            runner.add(item)
        events: dict[str, list[TokenEvent]] = {name: [] for name in "abc"}
        for _ in range(after):
            for event in runner.step():
                events[event.request_id].append(event)
        here = runner.abort(gone)
        assert here != bool(events[gone] and events[gone][-1].finish_reason)
        runner.check_integrity()
        for span in made[index].spans:
            assert isinstance(span, FakeSource) and span.releases == 1
        before = len(events[gone])
        runner.add(items[index]())
        for name, more in run(runner).items():
            events[name] += more
        again = told({gone: events[gone][before:]})[gone]
        assert [step[0] for step in again] == [step[0] for step in alone[gone]]
        for name in set("abc") - {gone}:
            assert [step[:3] for step in told(events)[name]] == [step[:3] for step in alone[name]]


def test_nobody_left_leaves_nothing_in_flight() -> None:
    runner = make(state_cache="none")
    for name in "ab":
        runner.add(request(name, range(9), greedy_params(9)))
    for _ in range(3):
        runner.step()
    assert runner.abort("a") and runner.runnable
    assert runner.abort("b") and not runner.runnable and not runner.has_work
    runner.check_integrity()
    stats = runner.stats()
    assert stats["free_blocks"] == stats["total_blocks"]


@pytest.mark.parametrize("host_bytes", [pytest.param(0, id="recompute"), pytest.param(10**9, id="swap")])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_preempted_in_flight_equals_undisturbed(every: int, host_bytes: int) -> None:
    """Preempted requests include ones whose last token has not been read, and ones that have just ended."""
    items = [item for item in workload(10) if item.sampling.prompt_logprobs is None and not item.pooled]
    plain = {name: tokens(of) for name, of in run(make("off"), *items).items()}
    items = [item for item in workload(10) if item.sampling.prompt_logprobs is None and not item.pooled]
    runner = make(host_bytes=host_bytes, max_chunk=16)
    # If a prompt is recomputed every other step, the request only ends if the prompt is computed in one step.
    found = run(runner, *items, preempt_every=every + (host_bytes == 0), limit=4000)
    assert {name: tokens(of) for name, of in found.items()} == plain
    stats = runner.stats()
    assert stats["preemptions"] > 5 and stats["host_bytes"] == 0
    assert stats["waited_swap"] > 0 or host_bytes == 0


def test_rows_of_an_image_stay_until_the_step_that_read_them_is_collected() -> None:
    runner = make(max_chunk=4)
    span = image(2, IMAGE)
    runner.add(request("a", range(12), greedy_params(1), [span]))
    releases = []
    assert isinstance(span, FakeSource)
    while runner.has_work:
        runner.step()
        releases.append((runner.stats()["batched_tokens"], span.releases))
    assert releases == [(4, 0), (8, 0), (12, 0), (12, 1)]


def test_an_image_that_fails_in_flight_ends_its_request_behind_what_it_has_drawn() -> None:
    """The rows of the second image never arrive; the first chunk is in flight when that becomes known."""
    runner = make()
    late = image(12, IMAGE, ready=False)
    runner.add(request("bad", range(25), greedy_params(3), [image(2, IMAGE), late]))
    runner.add(request("good", range(9), greedy_params(3)))
    assert runner.step() == []
    failure = OSError("the encoder is gone")
    assert isinstance(late, FakeSource)
    late.error = failure
    events = [event for _ in range(6) for event in runner.step()]
    assert [(e.finish_reason, e.error) for e in events if e.request_id == "bad"] == [("error", failure)]
    assert [e.finish_reason for e in events if e.request_id == "good"] == [None, None, "length"]
    assert not runner.has_work
    runner.check_integrity()


def test_rows_that_are_read_again_are_not_given_back() -> None:
    """The request is preempted, to be recomputed, before the step that read its image is collected."""
    runner = make(host_bytes=0, state_cache="none")
    span = image(2, IMAGE)
    runner.add(request("a", range(12), greedy_params(4), [span]))
    runner.step()
    preempt(runner, "a")
    runner.step()
    assert isinstance(span, FakeSource) and span.releases == 0
    assert runner.stats()["recomputes"] == 1
    plain = run(make("off"), request("a", range(12), greedy_params(4), [image(2, IMAGE)]))
    assert tokens(run(runner)["a"]) == tokens(plain["a"])[1:]
    assert span.releases == 1


def test_a_step_in_flight_holds_rows_that_others_wait_for() -> None:
    """Nothing can be computed before the second image is ready, and its rows may need the memory of the first one's."""
    runner = make()
    spans = [image(2, IMAGE), image(12, IMAGE, ready=False)]
    first, second = spans
    assert isinstance(first, FakeSource) and isinstance(second, FakeSource)
    runner.add(request("a", range(25), greedy_params(1), spans))
    runner.step()
    assert first.releases == 0 and runner.runnable
    runner.step()
    assert first.releases == 1 and not runner.runnable
    second.ready = True
    assert len(tokens(run(runner)["a"])) == 1


@pytest.mark.parametrize("batch_slots", [2, 8])
def test_samples_of_one_prompt(batch_slots: int) -> None:
    sampling = SamplingParams(max_tokens=9, seed=4, stop_token_ids=frozenset(range(0, 97, 8)), frequency_penalty=0.3)

    def group() -> list[DecoderRequest]:
        return [request(f"s{i}", range(30), sampling, [image(4, IMAGE)], sample_index=i) for i in range(5)]

    alone = {name: tokens(of) for item in group() for name, of in run(make("off"), item).items()}
    runner = make(max_seqs=batch_slots)
    runner.add(*group())
    assert {name: tokens(of) for name, of in run(runner).items()} == alone
    assert runner.stats()["forks"] == min(batch_slots, 5) - 1


def test_a_step_counts_its_own_time_and_not_that_of_the_one_before() -> None:
    """A clock that advances by a second between a launch and the collection of the previous step, and by one after it:
    each step is in flight for three seconds, two of which belong to other steps."""
    runner = make(max_batched_tokens=4)
    seconds = iter(range(10**6))
    runner.timer.clock = lambda: next(seconds)
    run(runner, request("first", [9] * 240, greedy_params(12)))
    runner.add(request("in time", range(40), greedy_params(1), timeout=20.5))
    with pytest.raises(DeadlineError, match=r"at least 40.000 s away"):
        runner.add(request("late", range(1, 41), greedy_params(1), timeout=20.5))
    run(runner)


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec_state", ["replay", "slots"])
@pytest.mark.parametrize("native", ["auto", "off"])
def test_accepted_counts_on_the_device_are_those_of_the_host(spec_state: str, native: str) -> None:
    """Tokens and counts arrive together, and the counts on the device equal those that the host then computes."""
    drawn = tokens(run(make("off"), request("a", [4, 5] * 6, greedy_params(40)))["a"])
    given = {"speculative": "ngram", "draft_policy": "fixed", "spec_state": spec_state, "native": native}
    runners = [make(overlap, **given) for overlap in ("off", "on")]
    for runner in runners:
        assert runner.speculation is not None
        runner.speculation.new_index = lambda sequence: _Sometimes(drawn)
        runner.add(request("a", [4, 5] * 6, greedy_params(40)))
    told_ = []
    for runner in runners:
        found: list[TokenEvent] = []
        while runner.has_work:
            found += runner.step()
            for sequence in runner.scheduler.running if runner.loop.flight is None else ():
                states = runner.builder.states
                if states._written[sequence.held.batch_slot] == sequence.held.admission:
                    counted = int(states.accepted[sequence.held.batch_slot])
                    assert counted == (sequence.held.replayed if states.replayed else sequence.held.accepted)
        told_.append(told({"a": found}))
    assert told_[0] == told_[1]
    stats = [runner.stats() for runner in runners]
    for name in ("drafted_1", "accepted_1", "drafted_2", "accepted_2", "drafted_3", "accepted_3"):
        assert stats[0][name] == stats[1][name] > 0
    assert stats[0]["accepted_2"] < stats[0]["drafted_2"]


class _Sometimes:
    """Drafts that are right up to a varying position."""

    def __init__(self, drawn: list[int]) -> None:
        self.drawn = drawn

    def propose(self, known: Any, count: int) -> list[int]:
        coming = self.drawn[len(known) - 12 : len(known) - 12 + count]
        return [token if place < len(known) % 4 else (token + 1) % 97 for place, token in enumerate(coming)]


def test_counts_of_rows_with_and_without_drafts() -> None:
    """Rows of 2, 0 and 3 drafts, the second one verified because of its ring's content, and a plain one."""
    runner = make("off", speculative="ngram")
    for name in "abcd":
        runner.add(request(name, range(5), greedy_params(9)))
    runner.step()
    made = sorted(runner.scheduler.running, key=lambda s: s.arrival)
    rows = []
    for sequence, drafts in zip(made, ([7, 8], [], [1, 2, 3], []), strict=True):
        sequence.draft.tokens = drafts
        rows.append(Row(sequence, 1 + len(drafts), len(sequence.tokens) - 1, len(drafts)))
    made[1].held.replayed = 3
    drawn = torch.tensor([7, 9, 0, 50, 1, 2, 3, 60, 70])
    assert accepted_drafts(drawn, rows).tolist() == [1, 0, 3]
    drawn[0] = 6
    assert accepted_drafts(drawn, rows).tolist() == [0, 0, 3]
    made[1].held.replayed = 3
    assert accepted_drafts(torch.tensor([50]), rows[1:2]).tolist() == [0]
