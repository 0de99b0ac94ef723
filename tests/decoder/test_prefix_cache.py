"""A cached prefix gives the same results as computing it, and exactly the usable prefixes are cached."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from counting import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoder import FakeSource, greedy_params, make_runner, random_weights, request, run, tiny_config, tokens

from decoder.arena import ArenaLayout
from decoder.config import DecoderConfig, DecoderOptions
from decoder.prefix_keys import key_at
from decoder.request import DecoderRequest, EmbeddingSource, TokenEvent
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from decoder.sequence import Sequence as Waiting

CONFIG = tiny_config("M-*EM*")
WEIGHTS = dict(random_weights(CONFIG))
SMALL = {"page_size": 4, "state_block": 4}


def make(mode: str, **options: Any) -> DecoderRunner:
    return make_runner(CONFIG, WEIGHTS, **({"state_cache": mode} | SMALL | options))


def lengths(runner: DecoderRunner) -> list[int]:
    assert runner.cache is not None
    return runner.cache.lengths()


def ids(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(CONFIG.vocab_size) for _ in range(count)]


def after_each_step(runner: DecoderRunner, item: DecoderRequest) -> list[tuple[int, list[int]]]:
    """(tokens computed in the step, prefix lengths that hold a checkpoint after it)."""
    runner.add(item)
    seen = []
    while runner.has_work:
        before = runner.stats()["batched_tokens"]
        runner.step()
        runner.check_integrity()
        seen.append((runner.stats()["batched_tokens"] - before, lengths(runner)))
    return seen


# -- traces: which prefix lengths hold a checkpoint after each step ----------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("align", [(10, [8]), (1, [8]), (1, [8, 12]), (1, [8, 12]), (1, [8, 12]), (1, [8, 12]), (1, [8, 16])]),
        ("all", [(10, [4, 8]), (1, [4, 8]), (1, [4, 8, 12]), (1, [4, 8, 12]), (1, [4, 8, 12]), (1, [4, 8, 12])]),
        ("auto", [(10, [8])] + [(1, [8])] * 4),
    ],
)
def test_prompt_of_ten_in_one_step(mode: str, expected: list[tuple[int, list[int]]]) -> None:
    """One prefill writes checkpoints inside its row; output crosses 12 in place, and under `align` moves the last
    boundary along while the prompt's own stays."""
    assert after_each_step(make(mode), request("a", ids(10), greedy_params(8)))[: len(expected)] == expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("align", [[], [8], [8]]), ("all", [[4], [4, 8], [4, 8]]), ("auto", [[], [8], [8]])],
)
def test_prompt_of_ten_in_pieces(mode: str, expected: list[list[int]]) -> None:
    steps = after_each_step(make(mode, max_chunk=7), request("a", ids(10), greedy_params(2)))
    assert [after for _, after in steps] == expected


@pytest.mark.parametrize(("mode", "expected"), [("align", [4, 8]), ("all", [4, 8])])
@pytest.mark.parametrize("prompt", [5, 6])
def test_output_that_crosses_a_boundary_leaves_it(mode: str, expected: list[int], prompt: int) -> None:
    """5 or 6 tokens computed, boundary at 8: the state after 8 is kept when token 8 has been computed."""
    steps = after_each_step(make(mode), request("a", ids(prompt), greedy_params(5)))
    assert [after for _, after in steps[: 8 - prompt]] == [[4]] * (8 - prompt)
    assert steps[8 - prompt][1] == expected


@pytest.mark.parametrize(
    ("mode", "after_b", "cached"),
    [("align", [4, 8, 8], (0, 4)), ("all", [4, 8, 8], (4, 4)), ("auto", [4, 8, 8], (0, 4))],
)
def test_a_prompt_that_parts_from_a_cached_one_leaves_a_junction(
    mode: str, after_b: list[int], cached: tuple[int, int]
) -> None:
    """A has 10 tokens; B shares 7, so one page, but no state there: it leaves one, and C finds it."""
    runner = make(mode)
    shared = ids(7)
    run(runner, request("a", [*shared, 90, 91, 92], greedy_params(1)))
    found = [run(runner, request("b", [*shared, 80, 81, 82], greedy_params(1)))["b"][0].cached_tokens]
    assert lengths(runner) == after_b
    found.append(run(runner, request("c", [*shared, 70, 71, 72], greedy_params(1)))["c"][0].cached_tokens)
    assert tuple(found) == cached
    stats = runner.stats()
    assert stats["cache_lost_tokens"] == (0 if mode == "all" else 4)


@pytest.mark.parametrize("pattern", ["M*", "*"])
def test_a_long_prefix_is_looked_up_again_in_few_steps(pattern: str) -> None:
    """Requests that wait for images look up their prefixes whenever the cache has changed."""

    def cost(pages: int) -> int:
        runner = make_runner(tiny_config(pattern), max_len=4000, max_batched_tokens=4000, **SMALL)
        assert runner.cache is not None
        prompt = ids(4 * pages + 1)
        run(runner, request("first", prompt, greedy_params(1)))
        sequence = Waiting(request("waits", [*prompt, 1, 2]), arrival=99, limit=1)
        assert runner.cache.lookup(sequence).tokens > 4 * pages - 8
        run(runner, request("other", [90] * 5, greedy_params(1)))
        return lines_run(runner.cache.lookup, sequence)

    few, many = cost(10), cost(600)
    assert many <= 5 * few, f"{few} lines with 10 pages, {many} with 600"


def test_the_key_of_a_page_takes_the_same_work_however_many_images_there_are() -> None:
    """A long video has hundreds of temporal patches, and its prompt thousands of pages."""

    def cost(images: int) -> int:
        prompt, spans = list[int](), list[EmbeddingSource]()
        for number in range(images):
            spans.append(FakeSource(len(prompt), 3, b"%d" % number))
            prompt += [1, 1, 1, 2]
        sequence = Waiting(request("a", prompt, spans=spans), arrival=0, limit=1)
        key_at(sequence, 4 * (images - 2), 4)
        return lines_run(key_at, sequence, 4 * (images - 1), 4)

    few, many = cost(3), cost(300)
    assert many == few, f"{few} lines with 3 images, {many} with 300"


def test_a_whole_prompt_is_never_a_hit() -> None:
    """One token is always computed, for its logits."""
    runner = make("all")
    prompt = ids(8)
    run(runner, request("a", prompt, greedy_params(1)))
    again = run(runner, request("a", prompt, greedy_params(1)))["a"][0]
    assert again.cached_tokens == 4
    assert run(runner, request("b", [*prompt, 1], greedy_params(1)))["b"][0].cached_tokens == 8


def test_a_conversation_goes_on_from_its_last_answer() -> None:
    runner, plain = make("auto"), make("none")
    prompt = ids(21)
    for _ in range(3):
        answer = tokens(run(runner, request("a", prompt, greedy_params(11)))["a"])
        assert answer == tokens(run(plain, request("a", prompt, greedy_params(11)))["a"])
        following = [*prompt, *answer, *ids(5, len(prompt))]
        event = run(runner, request("a", following, greedy_params(1)))["a"][0]
        assert event.cached_tokens == len(prompt) + len(answer) - 1
        prompt = following


def test_positions_the_caller_names_are_kept() -> None:
    runner = make("auto")
    system = ids(37)
    run(runner, request("a", [*system, *ids(30, 1)], greedy_params(1), checkpoint_at=(37,)))
    event = run(runner, request("b", [*system, *ids(30, 2)], greedy_params(1), checkpoint_at=(37,)))["b"][0]
    assert event.cached_tokens == 37


# -- images ------------------------------------------------------------------------------------------------------------


def image_span(start: int, rows: torch.Tensor, *, ready: bool = True) -> FakeSource:
    return FakeSource(start, rows.shape[0], rows.numpy().tobytes(), rows, ready=ready)


def source(span: EmbeddingSource) -> FakeSource:
    assert isinstance(span, FakeSource)
    return span


def test_same_image_new_question_needs_no_rows() -> None:
    """The source of the second request never becomes ready; it is released anyway."""
    runner = make("auto")
    rows = torch.randn(19, CONFIG.hidden_size)
    prompt = [5, 6, 7, *[96] * 19]
    run(runner, request("a", [*prompt, 1, 2, 3], greedy_params(2), [image_span(3, rows)]))
    waiting = image_span(3, rows, ready=False)
    runner.add(request("b", [*prompt, 8, 9], greedy_params(2), [waiting]))
    assert runner.runnable
    event = runner.step()[0]
    assert (event.cached_tokens, source(waiting).releases) == (22, 1)
    found = [event, *run(runner)["b"]]
    plain = run(make("none"), request("b", [*prompt, 8, 9], greedy_params(2), [image_span(3, rows)]))["b"]
    assert tokens(found) == tokens(plain)


@pytest.mark.parametrize("cached", [3, 4], ids=["up-to-it", "into-it"])
def test_a_hit_that_ends_at_an_awaited_image_is_not_runnable(cached: int) -> None:
    """The text before the image is cached, so there is nothing to do until the rows are ready."""
    runner = make("auto")
    rows = torch.randn(9, CONFIG.hidden_size)
    prompt = [5, 6, 7, *[96] * 9, 1, 2]
    run(runner, request("a", prompt, greedy_params(1), [image_span(3, rows)], checkpoint_at=(cached,)))
    assert runner.cache is not None
    for checkpoint in [c for c in runner.cache.order if c.tokens != cached]:
        runner.cache.drop(checkpoint)
    waiting = image_span(3, rows, ready=False)
    runner.add(request("b", prompt, greedy_params(1), [waiting]))
    assert runner.has_work and not runner.runnable
    assert runner.step() == []
    source(waiting).ready = True
    assert runner.runnable
    assert run(runner)["b"][0].cached_tokens == cached


def test_another_image_in_the_same_place_is_another_prompt() -> None:
    runner = make("all")
    prompt = [5, 6, 7, *[96] * 19, 1, 2, 3]
    for _ in range(3):
        rows = torch.randn(19, CONFIG.hidden_size)
        event = run(runner, request("a", prompt, greedy_params(1), [image_span(3, rows)]))["a"][0]
        assert event.cached_tokens == 0
        waiting = image_span(3, torch.randn(19, CONFIG.hidden_size), ready=False)
        runner.add(request("b", prompt, greedy_params(1), [waiting]))
        runner.step()
        assert runner.stats()["cache_hits"] == 0 and not source(waiting).releases
        runner.abort("b")


def test_rows_of_an_image_are_told_from_the_text_of_its_placeholder() -> None:
    runner = make("all")
    rows = torch.randn(9, CONFIG.hidden_size)
    run(runner, request("a", [5, *[96] * 9, 1, 2, 3], greedy_params(1), [image_span(1, rows)]))
    assert run(runner, request("b", [5, *[96] * 9, 1, 2, 3], greedy_params(1)))["b"][0].cached_tokens == 0


def test_salts_share_nothing() -> None:
    runner = make("all")
    for salt, expected in ((b"one", 0), (b"two", 0), (b"one", 12), (b"", 0)):
        event = run(runner, request("a", ids(14), greedy_params(1), salt=salt))["a"][0]
        assert event.cached_tokens == expected


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_a_shared_partial_page_is_copied_before_it_is_written() -> None:
    """Three prompts continue after 6 tokens, in the middle of a page, at the same time as the request that wrote it."""
    runner, plain = make("auto"), make("none")
    prompt = ids(6)
    items = [request(str(i), [*prompt, *ids(3 + i, i)], greedy_params(12), checkpoint_at=(6,)) for i in range(4)]
    expected = {item.request_id: tokens(run(plain, item)[item.request_id]) for item in items}
    runner.add(items[0])
    runner.step()
    assert 6 in lengths(runner)
    found = run(runner, *items[1:])
    assert {name: tokens(events) for name, events in found.items() if name != "0"} == {
        name: drawn for name, drawn in expected.items() if name != "0"
    }
    assert [found[name][0].cached_tokens for name in "123"] == [6, 6, 6]
    assert runner.stats()["preemptions"] == 0


def test_equal_prompts_at_once_wait_a_step_for_the_first() -> None:
    """A state can be used when it has been written: the others are admitted a step later, and compute only their
    ends."""
    runner = make("auto")
    prompt = ids(30)
    for index in range(5):
        runner.add(request(str(index), [*prompt, 3 + index, 4], greedy_params(2), checkpoint_at=(30,)))
    first = runner.step()
    assert [event.request_id for event in first] == ["0"]
    found = run(runner)
    assert [found[str(index)][0].cached_tokens for index in range(5)] == [0, 30, 30, 30, 30]
    assert runner.stats()["batched_tokens"] == 32 + 4 * 2 + 5


# -- memory ------------------------------------------------------------------------------------------------------------


def block_bytes(config: DecoderConfig = CONFIG, page_size: int = 4) -> int:
    return ArenaLayout.of(config, DecoderOptions(page_size=page_size)).block_bytes


@pytest.mark.parametrize("mode", ["align", "all", "auto"])
@pytest.mark.parametrize("host_bytes", [0, 10**9])
def test_cached_memory_is_evicted_for_running_requests(mode: str, host_bytes: int) -> None:
    """As many preemptions with a cache as without: none here, although the memory is full of checkpoints."""
    options = {"max_len": 48, "memory_bytes": 6 * block_bytes(), "host_bytes": host_bytes, "max_seqs": 2}
    runner = make(mode, **options)
    for index in range(12):
        run(runner, request("a", ids(30, index), greedy_params(9)), request("b", ids(20, index), greedy_params(9)))
    stats = runner.stats()
    assert stats["preemptions"] == 0 and stats["cache_evicted"] > 0
    assert stats["free_blocks"] + stats["cache_checkpoints"] <= stats["total_blocks"]


@pytest.mark.parametrize("mode", ["align", "all", "auto"])
@pytest.mark.parametrize("states", [0, 1, 3])
def test_no_more_states_are_kept_than_the_budget_has_bytes_for(mode: str, states: int) -> None:
    """However much memory the arena has; answers are the same."""
    budget = (states + 1) * ArenaLayout.of(CONFIG, DecoderOptions(page_size=4)).slot_bytes - 1
    runner, plain = make(mode, checkpoint_bytes=budget, max_seqs=2), make("none")
    most = 0
    for index in range(6):
        items = [request(name, ids(20 + index, index % 2 + seed), greedy_params(9)) for seed, name in enumerate("ab")]
        found = run(runner, *items)
        most = max(most, runner.stats()["cache_checkpoints"])
        assert {n: tokens(e) for n, e in found.items()} == {n: tokens(e) for n, e in run(plain, *items).items()}
    assert most == states


def test_memory_for_one_request_alone_still_gives_hits() -> None:
    """The request takes over the cached state itself if there is no memory for a copy."""
    config = tiny_config("M*")
    weights = dict(random_weights(config))
    layout = ArenaLayout.of(config, DecoderOptions(page_size=4))
    options = {"max_len": 48, "memory_bytes": layout.blocks_for(1, 48) * layout.block_bytes, "max_seqs": 2}
    runner = make_runner(config, weights, state_cache="auto", **SMALL, **options)
    plain = make_runner(config, weights, state_cache="none", page_size=4)
    prompt = ids(30)
    for _ in range(3):
        item = request("a", prompt, greedy_params(4))
        found = run(runner, item)["a"]
        assert tokens(found) == tokens(run(plain, item)["a"])
        prompt = [*prompt, *tokens(found)]
    assert runner.stats()["cache_hits"] == 2 and runner.stats()["preemptions"] == 0


def test_the_cheapest_loss_goes_first() -> None:
    """Of a state that saves 32 tokens and one that saves 6 more, the second is evicted, though it was used later; used
    states stay longer than unused ones."""
    runner = make("auto")
    run(runner, request("a", ids(39), greedy_params(1), checkpoint_at=(38,)))
    assert runner.cache is not None and lengths(runner) == [32, 38]
    runner.cache.evict()
    assert lengths(runner) == [32]
    runner.cache.clear()
    for seed in (1, 2):
        run(runner, request("a", ids(20, seed), greedy_params(1)))
    run(runner, request("a", [*ids(20, 1)[:16], 1, 2], greedy_params(1)))
    while len(lengths(runner)) > 1:
        runner.cache.evict()
    assert run(runner, request("a", ids(20, 1), greedy_params(1)))["a"][0].cached_tokens == 16


def test_flush_and_close_leave_nothing() -> None:
    runner = make("all")
    run(runner, request("a", ids(30), greedy_params(9)))
    assert runner.stats()["cache_bytes"] > 0
    runner.flush_cache()
    runner.check_integrity()
    stats = runner.stats()
    assert stats["cache_bytes"] == stats["cache_checkpoints"] == 0
    assert stats["free_blocks"] == stats["total_blocks"]
    run(runner, request("a", ids(30), greedy_params(9)))
    runner.close()
    assert runner.stats()["free_blocks"] == stats["total_blocks"]


def test_none_keeps_nothing() -> None:
    runner = make("none")
    for _ in range(2):
        assert run(runner, request("a", ids(30), greedy_params(3)))["a"][0].cached_tokens == 0
    assert runner.stats()["cache_checkpoints"] == 0 and runner.stats()["free_blocks"] == runner.stats()["total_blocks"]


# -- cached = uncached -------------------------------------------------------------------------------------------------

PATTERNS = {pattern: tiny_config(pattern) for pattern in ("M*-M", "MM", "**-", "*EM*")}
MODELS = {pattern: dict(random_weights(config, seed=3)) for pattern, config in PATTERNS.items()}
PIXELS = [torch.randn(n, CONFIG.hidden_size, generator=torch.Generator().manual_seed(n)) for n in (5, 9, 13)]


def sampling(kind: int) -> SamplingParams:
    if kind == 0:
        return greedy_params(7, logprobs=2)
    if kind == 1:
        return SamplingParams(max_tokens=7, temperature=1.0, seed=kind, logprobs=1)
    return SamplingParams(max_tokens=7, seed=kind, top_p=0.9, repetition_penalty=1.2, logprobs=0)


def conversation(parts: Sequence[tuple[int, int]], kind: int, name: str) -> DecoderRequest:
    """Text and images by number, one after the other: prompts that share their first parts share a prefix."""
    prompt: list[int] = []
    spans = []
    for what, number in parts:
        if what == 0:
            prompt += ids(3 + 5 * number, number)
        else:
            spans.append(image_span(len(prompt), PIXELS[number % 3]))
            prompt += [96] * PIXELS[number % 3].shape[0]
    return request(name, [*prompt, 1], sampling(kind), spans)


def answers(runner: DecoderRunner, wanted: Sequence[tuple[list[tuple[int, int]], int]], batch: int) -> list[Any]:
    """Tokens and logprobs, in the order of the requests; `batch` of them at a time."""
    found: list[Any] = []
    for first in range(0, len(wanted), batch):
        items = [conversation(*item, str(first + i)) for i, item in enumerate(wanted[first : first + batch])]
        events: dict[str, list[TokenEvent]] = run(runner, *items)
        for item in items:
            of = events[item.request_id]
            found.append((tokens(of), [e.logprob for e in of], [span.releases for span in item.spans]))  # type: ignore[attr-defined]
    return found


PARTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(PATTERNS)),
    st.sampled_from(["align", "all", "auto"]),
    st.lists(st.tuples(PARTS, st.integers(0, 2)), min_size=2, max_size=6),
    st.sampled_from([1, 7, None]),
    st.sampled_from([None, 0, 10**9]),
    st.integers(1, 4),
)
def test_cached_equals_uncached(
    pattern: str,
    mode: str,
    wanted: list[tuple[list[tuple[int, int]], int]],
    chunk: int | None,
    host_bytes: int | None,
    batch: int,
) -> None:
    """Every mode, chunk size and kind of model; with `host_bytes` there is memory for little more than one request."""
    config, weights = PATTERNS[pattern], MODELS[pattern]
    layout = ArenaLayout.of(config, DecoderOptions(page_size=4))
    memory = None if host_bytes is None else (layout.blocks_for(1, 80) + 1) * layout.block_bytes
    options = {"max_len": 80, "max_chunk": chunk, "memory_bytes": memory, "host_bytes": host_bytes, "max_seqs": 4}
    cached = make_runner(config, weights, state_cache=mode, **SMALL, **options)
    found = answers(cached, [*wanted, *wanted], batch)
    expected = answers(make_runner(config, weights, state_cache="none", max_len=80, page_size=4), wanted, 1)
    for (drawn, logprobs, releases), (plain, exact, _) in zip(found, [*expected, *expected], strict=True):
        assert drawn == plain
        assert logprobs == pytest.approx(exact, abs=1e-4)
        assert all(count == 1 for count in releases)
    cached.close()
    assert cached.stats()["free_blocks"] == cached.stats()["total_blocks"]
