"""A request's result does not depend on other requests, chunks, memory or time; and no resources are left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_decoder import (
    FakeSource,
    greedy_params,
    image,
    make_runner,
    random_weights,
    request,
    run,
    tiny_config,
    tokens,
)

from decoder.arena import ArenaLayout
from decoder.config import DecoderConfig, DecoderOptions
from decoder.pace import DeadlineError
from decoder.request import DecoderRequest, EmbeddingSource
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams

CONFIG = tiny_config("M-*EM*")
WEIGHTS = dict(random_weights(CONFIG))
OUTPUT = 14


def block_bytes(config: DecoderConfig = CONFIG) -> int:
    return ArenaLayout.of(config, DecoderOptions()).block_bytes


def params(index: int) -> SamplingParams:
    return [
        greedy_params(OUTPUT),
        SamplingParams(max_tokens=OUTPUT, temperature=1.0, seed=index),
        SamplingParams(max_tokens=OUTPUT, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01, seed=index),
        SamplingParams(
            max_tokens=OUTPUT,
            seed=index,
            repetition_penalty=1.3,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logprobs=2,
        ),
        SamplingParams(max_tokens=OUTPUT, seed=index, logit_bias={3: 2.0, 5: -100.0}, min_tokens=4, top_k=5),
    ][index % 5]


def workload(count: int = 12) -> list[Callable[[], DecoderRequest]]:
    """Requests of many kinds, made anew for each run because sources are used up."""
    draw = random.Random(1)
    made: list[Callable[[], DecoderRequest]] = []
    for index in range(count):
        length = draw.choice([1, 2, 9, 16, 17, 33, 50])
        prompt = [draw.randrange(CONFIG.vocab_size) for _ in range(length)]
        rows = [(5, 7), (20, 9)][: 0 if length < 16 else 1 if length < 33 else 2]
        generator = torch.Generator().manual_seed(index)
        images = [(start, torch.randn(size, CONFIG.hidden_size, generator=generator)) for start, size in rows]

        def make(index: int = index, prompt: list[int] = prompt, images: Any = images) -> DecoderRequest:
            spans = [image(start, embeddings) for start, embeddings in images]
            return request(f"r{index}", prompt, params(index), spans, eos_token_ids=frozenset({7}))

        made.append(make)
    return made


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """Each request of the workload by itself."""
    runner = make_runner(CONFIG, WEIGHTS)
    found: dict[str, list[int]] = {}
    for make in workload():
        found |= {name: tokens(events) for name, events in run(runner, make()).items()}
    return found


def together(**options: Any) -> tuple[dict[str, list[int]], DecoderRunner]:
    runner = make_runner(CONFIG, WEIGHTS, **options)
    events = run(runner, *[make() for make in workload()])
    return {name: tokens(of) for name, of in events.items()}, runner


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="eight-at-a-time"),
        pytest.param({"max_seqs": 32}, id="all-at-once"),
        pytest.param({"max_batched_tokens": 1}, id="one-token-steps"),
        pytest.param({"max_batched_tokens": 5}, id="fewer-tokens-than-rows"),
        pytest.param({"max_chunk": 1}, id="chunk-1"),
        pytest.param({"max_chunk": 3}, id="chunk-3"),
        pytest.param({"max_chunk": 8}, id="chunk-8"),
        pytest.param({"page_size": 4}, id="small-pages"),
    ],
)
def test_packed_equals_alone(alone: dict[str, list[int]], options: dict[str, Any]) -> None:
    found, _ = together(**options)
    assert found == alone


@pytest.mark.parametrize("host_bytes", [pytest.param(0, id="recompute"), pytest.param(10**9, id="swap")])
@pytest.mark.parametrize("blocks", [5, 6])
def test_preempted_equals_alone(alone: dict[str, list[int]], blocks: int, host_bytes: int) -> None:
    options = {"max_len": 66, "memory_bytes": blocks * block_bytes(), "page_size": 4, "host_bytes": host_bytes}
    found, runner = together(**options)
    stats = runner.stats()
    assert found == alone
    assert stats["preemptions"] > 0
    assert (stats["recomputes"] == 0) == (host_bytes > 0)
    assert stats["host_bytes"] == 0


def test_uninitialised_memory_is_never_read(alone: dict[str, list[int]]) -> None:
    runner = make_runner(CONFIG, WEIGHTS)
    runner.arena.buffer.fill_(255)
    events = run(runner, *[make() for make in workload()])
    assert {name: tokens(of) for name, of in events.items()} == alone


def test_resumed_equals_uninterrupted(alone: dict[str, list[int]]) -> None:
    runner = make_runner(CONFIG, WEIGHTS)
    for make in workload():
        first = make()
        known = alone[first.request_id][:5]
        if len(known) < 5:
            continue
        again = request(
            first.request_id,
            first.prompt_ids,
            first.sampling,
            first.spans,
            eos_token_ids=frozenset({7}),
            output_ids=known,
        )
        events = run(runner, again)[first.request_id]
        assert known + tokens(events) == alone[first.request_id]


def test_samples_of_one_request_differ_and_repeat() -> None:
    runner = make_runner(CONFIG, WEIGHTS)
    sampling = SamplingParams(max_tokens=12, seed=2**63 + 5)
    drawn = [tokens(run(runner, request("a", [4, 5, 6], sampling, sample_index=i))["a"]) for i in (0, 1, 0)]
    assert drawn[0] == drawn[2] != drawn[1]


# -- images ------------------------------------------------------------------------------------------------------------


def spans_at(*places: tuple[int, int], ready: bool = True) -> list[FakeSource]:
    return [image(start, torch.randn(length, CONFIG.hidden_size), ready=ready) for start, length in places]


def source(span: EmbeddingSource) -> FakeSource:
    assert isinstance(span, FakeSource)
    return span


def test_text_before_an_image_is_computed_while_it_is_awaited() -> None:
    runner = make_runner(CONFIG, WEIGHTS)
    spans = spans_at((10, 5), (20, 5), ready=False)
    runner.add(request("a", range(30), greedy_params(1), spans))
    assert runner.runnable and runner.step() == []
    assert runner.stats()["batched_tokens"] == 10
    assert not runner.runnable and runner.has_work
    assert runner.step() == [] and runner.stats()["batched_tokens"] == 10
    source(spans[0]).ready = True
    assert runner.runnable and runner.step() == []
    assert runner.stats()["batched_tokens"] == 20
    assert [source(span).releases for span in spans] == [1, 0]
    source(spans[1]).ready = True
    assert len(runner.step()) == 1
    assert [source(span).releases for span in spans] == [1, 1]
    runner.check_integrity()


def test_rows_stay_leased_until_the_last_is_computed() -> None:
    runner = make_runner(CONFIG, WEIGHTS, max_chunk=4)
    spans = spans_at((2, 7))
    runner.add(request("a", range(12), greedy_params(1), spans))
    releases = []
    while runner.has_work:
        runner.step()
        releases.append(source(spans[0]).releases)
    assert releases == [0, 0, 1]


def test_a_failed_image_ends_its_request_and_no_other() -> None:
    runner = make_runner(CONFIG, WEIGHTS)
    spans = spans_at((10, 5), (20, 5), ready=False)
    runner.add(request("bad", range(30), greedy_params(3), spans))
    runner.add(request("good", range(9), greedy_params(3)))
    runner.step()
    failure = OSError("the encoder is gone")
    source(spans[0]).error = failure
    assert runner.runnable
    events = [event for _ in range(5) for event in runner.step()]
    bad = [event for event in events if event.request_id == "bad"]
    assert [(e.finish_reason, e.error, e.token_id) for e in bad] == [("error", failure, None)]
    assert [e.finish_reason for e in events if e.request_id == "good"][-1] == "length"
    assert [source(span).releases for span in spans] == [1, 1]
    assert not runner.has_work
    runner.check_integrity()
    assert runner.stats()["used_slots"] == runner.stats()["used_pages"] == 0


def test_rows_of_a_wrong_shape_end_their_request_with_the_numbers() -> None:
    runner = make_runner(CONFIG, WEIGHTS)
    wrong = FakeSource(2, 6, b"k", torch.randn(5, CONFIG.hidden_size))
    events = run(runner, request("a", range(12), greedy_params(2), [wrong]), request("b", range(5), greedy_params(2)))
    assert events["a"][0].finish_reason == "error"
    assert "(6, 32)" in str(events["a"][0].error) and "(5, 32)" in str(events["a"][0].error)
    assert len(tokens(events["b"])) == 2


def test_a_stuck_request_makes_room_for_one_that_can_run() -> None:
    """One batch slot: the first request waits for an image that is not encoded until the second one has ended."""
    runner = make_runner(CONFIG, WEIGHTS, max_seqs=1)
    spans = spans_at((10, 5), (20, 5), ready=False)
    source(spans[0]).ready = True
    runner.add(request("stuck", range(30), greedy_params(2), spans))
    runner.add(request("ready", range(30), greedy_params(2), spans_at((10, 5))))
    ended = []
    while not ended:
        assert runner.runnable
        ended = [event.request_id for event in runner.step() if event.finish_reason]
    assert ended == ["ready"]
    source(spans[1]).ready = True
    assert set(run(runner)) == {"stuck"}
    assert runner.stats()["recomputes"] == 0


# -- the end of a request ----------------------------------------------------------------------------------------------


def test_abort_frees_all_at_any_time() -> None:
    runner = make_runner(CONFIG, WEIGHTS, max_seqs=2, max_chunk=5)
    spans = {name: spans_at((4, 6)) for name in "abc"}
    for name in "abc":
        runner.add(request(name, range(20), greedy_params(5), spans[name]))
    runner.step()
    assert runner.abort("a") and runner.abort("c")
    assert not runner.abort("a") and not runner.abort("nobody")
    runner.check_integrity()
    runner.step()
    assert runner.abort("b")
    runner.check_integrity()
    stats = runner.stats()
    assert stats["used_slots"] == stats["used_pages"] == stats["running"] == stats["waiting"] == 0
    assert [source(spans[name][0]).releases for name in "abc"] == [1, 1, 1]
    assert not runner.has_work and not runner.runnable
    assert run(runner, request("a", range(20), greedy_params(2)))["a"][-1].finish_reason == "length"


def test_abort_of_a_swapped_request_frees_host_memory() -> None:
    runner = make_runner(CONFIG, WEIGHTS, max_len=66, page_size=8, memory_bytes=4 * block_bytes(), host_bytes=10**9)
    for index in range(4):
        runner.add(request(str(index), range(20), greedy_params(40)))
    while runner.stats()["host_bytes"] == 0:
        runner.step()
    for index in range(4):
        assert runner.abort(str(index))
    runner.check_integrity()
    assert runner.stats()["host_bytes"] == 0


def first_tokens(count: int) -> list[int]:
    return tokens(run(make_runner(CONFIG, WEIGHTS), request("a", range(9), greedy_params(count)))["a"])


def test_end_token_ends_and_is_named() -> None:
    drawn = first_tokens(6)
    end = drawn[3]
    cut = drawn.index(end)
    runner = make_runner(CONFIG, WEIGHTS)
    events = run(runner, request("a", range(9), greedy_params(6), eos_token_ids=frozenset({end})))["a"]
    assert tokens(events) == drawn[: cut + 1]
    assert (events[-1].finish_reason, events[-1].stop_token) == ("stop", end)
    assert all(event.finish_reason is None and event.stop_token is None for event in events[:-1])
    ignoring = greedy_params(6, ignore_eos=True)
    assert tokens(run(runner, request("a", range(9), ignoring, eos_token_ids=frozenset({end})))["a"]) == drawn
    stopping = greedy_params(6, ignore_eos=True, stop_token_ids=frozenset({end}))
    assert run(runner, request("a", range(9), stopping))["a"][-1].stop_token == end


def test_min_tokens_holds_every_end_back() -> None:
    drawn = first_tokens(8)
    runner = make_runner(CONFIG, WEIGHTS)
    for minimum in (1, 3, 5):
        sampling = greedy_params(8, min_tokens=minimum, stop_token_ids=frozenset(drawn[1:2]))
        events = run(runner, request("a", range(9), sampling, eos_token_ids=frozenset(drawn[:1])))["a"]
        ends = set(drawn[:2])
        assert len(tokens(events)) > minimum
        assert not ends & set(tokens(events)[:minimum])


def test_length_limits() -> None:
    runner = make_runner(CONFIG, WEIGHTS, max_len=32)
    assert len(tokens(run(runner, request("a", range(30), greedy_params(50)))["a"])) == 2
    events = run(runner, request("a", range(20), SamplingParams(temperature=0.0)))["a"]
    assert len(tokens(events)) == 12 and events[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"prompt": range(32)}, "32 tokens .* max_len 32.* at most 31", id="too-long"),
        pytest.param({"prompt": []}, "empty", id="empty"),
        pytest.param({"prompt": [5, 97]}, "97 is not between 0 and 96", id="unknown-token"),
        pytest.param({"prompt": [5], "output_ids": [1] * 8}, "8 output tokens", id="nothing-left-to-draw"),
        pytest.param({"prompt": range(9), "spans": [(7, 3)]}, "7 to 10 .* 9 tokens", id="image-beyond-prompt"),
        pytest.param({"prompt": range(9), "spans": [(1, 3), (3, 2)]}, "from row 4 on", id="images-overlap"),
    ],
)
def test_what_can_never_be_served_is_refused(changes: dict[str, Any], message: str) -> None:
    runner = make_runner(CONFIG, WEIGHTS, max_len=32)
    places = changes.pop("spans", ())
    with pytest.raises(ValueError, match=message):
        runner.add(request("a", changes.pop("prompt"), greedy_params(8), spans_at(*places), **changes))
    assert not runner.has_work


def test_names_are_unique_while_in_use() -> None:
    runner = make_runner(CONFIG, WEIGHTS)
    runner.add(request("a", [1]))
    with pytest.raises(ValueError, match="'a'"):
        runner.add(request("a", [2]))


def test_priority_goes_first() -> None:
    runner = make_runner(CONFIG, WEIGHTS, max_seqs=1)
    order = []
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 3)):
        runner.add(request(name, range(5), greedy_params(2), priority=priority))
    while runner.has_work:
        order += [event.request_id for event in runner.step() if event.finish_reason]
    assert order == ["high", "first", "second", "low"]


def test_close_ends_everything() -> None:
    runner = make_runner(CONFIG, WEIGHTS, max_seqs=1)
    spans = spans_at((2, 3))
    runner.add(request("a", range(9), greedy_params(9), spans))
    runner.add(request("b", range(9)))
    runner.step()
    runner.close()
    runner.close()
    assert not runner.has_work and source(spans[0]).releases == 1
    runner.check_integrity()


def test_weights_that_do_not_fit_are_all_named() -> None:
    weights = dict(WEIGHTS)
    del weights["model.norm_f.weight"]
    weights["model.layers.0.mixer.D"] = torch.zeros(3)
    weights["mtp.layers.0.norm.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match="missing model.norm_f.weight") as raised:
        make_runner(CONFIG, weights)
    assert "unknown mtp.layers.0.norm.weight" in str(raised.value)
    assert "model.layers.0.mixer.D has shape (3,), not (4,)" in str(raised.value)


def test_weights_are_copied() -> None:
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    runner = make_runner(CONFIG, weights)
    for tensor in weights.values():
        tensor.zero_()
    assert tokens(run(runner, request("a", range(9), greedy_params(6)))["a"]) == first_tokens(6)


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_a_deadline_that_cannot_be_met_is_refused_with_both_numbers() -> None:
    """With one second per step of 4 tokens, 40 prompt tokens are 10 s away."""
    runner = make_runner(CONFIG, WEIGHTS, max_batched_tokens=4)
    seconds = iter(range(10**6))
    runner.timer.clock = lambda: next(seconds)
    run(runner, request("first", range(8), greedy_params(1)))
    runner.add(request("in time", range(40), greedy_params(1), timeout=10.5))
    message = r"deadline is 10.500 s away .* at least 20.000 s away: at least 80 prompt tokens"
    with pytest.raises(DeadlineError, match=message):
        runner.add(request("late", range(1, 41), greedy_params(1), timeout=10.5))
    assert set(runner.answers.sequences) == {"in time"}
    run(runner)


def test_a_deadline_looks_up_no_more_prefixes_than_it_takes() -> None:
    """A request is rejected once the prompts before it take too long, and accepted once all others would not."""
    runner = make_runner(CONFIG, WEIGHTS, max_batched_tokens=4, max_seqs=1, state_cache="all")
    seconds = iter(range(10**6))
    runner.timer.clock = lambda: next(seconds)
    run(runner, request("first", range(32), greedy_params(1)))
    for index in range(30):
        runner.add(request(f"waits {index}", [*range(32), 50 + index], greedy_params(1)))

    def looked_up() -> int:
        return sum(bool(sequence.lookup.chain) for sequence in runner.scheduler.waiting)

    with pytest.raises(DeadlineError, match="at least 21 prompt tokens"):
        runner.add(request("late", range(60, 80), greedy_params(1), timeout=5.0))
    assert looked_up() == 1
    runner.add(request("in time", [1] * 200, greedy_params(1), timeout=(200 + 5 + 25 * 33) / 4 + 0.1))
    assert looked_up() == 1 + 1 + 4


def test_a_deadline_counts_no_token_that_will_not_be_drawn() -> None:
    """`min_tokens` far above what `max_len` allows, and existing output."""
    runner = make_runner(CONFIG, WEIGHTS, max_batched_tokens=4)
    seconds = iter(range(10**6))
    runner.timer.clock = lambda: next(seconds)
    run(runner, request("first", range(8), greedy_params(1)))
    params = SamplingParams(min_tokens=10**9, temperature=0.0)
    room = runner.options.max_len - 4
    with pytest.raises(DeadlineError, match=f"at least {room}.000 s away"):
        runner.add(request("late", range(4), params, timeout=room - 0.5))
    runner.add(request("in time", range(4), params, timeout=room + 0.5))
    assert len(run(runner)["in time"]) == room
