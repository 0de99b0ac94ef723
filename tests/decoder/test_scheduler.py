"""The scheduler without a model: every request ends, nothing is lost, no step exceeds its budget, and rows are in
order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from counting import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoder import FakeSource

from decoder.blocks import SuperblockPool
from decoder.checkpoints import Placement
from decoder.config import DecoderOptions
from decoder.metadata import chunk_end
from decoder.pace import Pace
from decoder.prefix_cache import PrefixCache
from decoder.request import DecoderRequest, EmbeddingSource
from decoder.sampling import SamplingParams
from decoder.scheduler import Scheduler
from decoder.sequence import Sequence
from decoder.step import Row, Step


def make(blocks: int = 12, per_block: int = 2, has_slots: bool = True, **options: Any) -> Scheduler:
    chosen = {"max_seqs": 4, "max_len": 48, "max_batched_tokens": 16, "page_size": 4} | options
    return Scheduler(
        DecoderOptions(**chosen), SuperblockPool(blocks, per_block, has_slots), page_bytes=10, slot_bytes=20
    )


def request(
    name: str, length: int, output: int = 4, spans: tuple[EmbeddingSource, ...] = (), priority: int = 0
) -> DecoderRequest:
    return DecoderRequest(name, [1] * length, SamplingParams(max_tokens=output), spans, priority=priority)


def span(start: int, length: int, ready: bool) -> FakeSource:
    return FakeSource(start, length, b"key", ready=ready)


def source(item: EmbeddingSource) -> FakeSource:
    assert isinstance(item, FakeSource)
    return item


def advance(scheduler: Scheduler) -> tuple[Step, list[str]]:
    """Runs one step as the runner does, with 1 for every drawn token. Returns the step and the requests that ended."""
    step = scheduler.schedule()
    check_step(scheduler, step)
    scheduler.commit(step)
    ended = [sequence.request_id for sequence, _ in step.failed]
    for row in step.rows:
        sequence = row.sequence
        while sequence.next_span < len(sequence.request.spans):
            item = sequence.request.spans[sequence.next_span]
            if item.end > sequence.computed:
                break
            item.release()
            sequence.next_span += 1
        if row.samples:
            sequence.tokens.append(1)
            if sequence.output_len >= sequence.limit:
                scheduler.finish(sequence)
                ended.append(sequence.request_id)
    scheduler.check_integrity()
    return step, ended


def check_step(scheduler: Scheduler, step: Step) -> None:
    options = scheduler.options
    assert step.tokens <= options.max_batched_tokens
    assert len({row.sequence.arrival for row in step.rows}) == len(step.rows) <= options.max_seqs
    kinds = [row.kind for row in step.rows]
    assert kinds == sorted(kinds)
    for row in step.rows:
        assert row.count >= 1 and row.start == row.sequence.computed
        assert len(row.sequence.held.pages) * options.page_size >= row.end or not scheduler.pool.pages_per_block
        assert row.sequence.held.batch_slot >= 0
        for item in row.sequence.request.spans:
            if item.start < row.end and item.end > row.start:
                assert item.ready and source(item).releases == 0
    slots = [row.sequence.slot for row in step.rows]
    assert len(set(slots)) == len(slots) or not scheduler.pool.has_slots


REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 17), st.integers(0, 2), st.integers(-1, 1)), min_size=1, max_size=9
)


@settings(max_examples=120)
@given(
    REQUESTS,
    st.integers(7, 14),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([0, 60, 10**6]),
    st.randoms(use_true_random=False),
)
def test_every_request_ends(
    wanted: list[tuple[int, int, int, int]],
    blocks: int,
    per_block: int,
    max_seqs: int,
    budget: int,
    host_bytes: int,
    chance: Any,
) -> None:
    """Random prompts, images that become ready only when nothing else can be done, memory for little more than one."""
    blocks = max(blocks, 1 + -(-12 // per_block))
    scheduler = make(blocks, per_block, max_seqs=max_seqs, max_batched_tokens=budget, host_bytes=host_bytes)
    spans: list[FakeSource] = []
    for index, (length, output, images, priority) in enumerate(wanted):
        own = tuple(span(3 + 8 * i, 5, False) for i in range(images) if 8 + 8 * i <= length)
        spans += own
        scheduler.queues.add(request(str(index), length, output, own, priority))
    ended: list[str] = []
    for _ in range(3000):
        if len(ended) == len(wanted):
            break
        if not scheduler.runnable:
            waiting = [item for item in spans if not source(item).ready]
            source(chance.choice(waiting)).ready = True
        step, finished = advance(scheduler)
        ended += finished
    assert sorted(ended) == sorted(str(index) for index in range(len(wanted)))
    assert scheduler.pool.free_blocks == blocks and scheduler.memory.host.used == 0


def test_rows_of_a_mixed_step() -> None:
    """Decode rows come first, in order of their slots; then the end of a prompt, then new prompts."""
    scheduler = make(blocks=16, max_batched_tokens=40)
    for name, length in (("a", 3), ("b", 3)):
        scheduler.queues.add(request(name, length))
    advance(scheduler)
    scheduler.queues.add(request("c", 46, 2))
    advance(scheduler)
    scheduler.queues.add(request("d", 5))
    step, _ = advance(scheduler)
    assert [(row.sequence.request_id, row.kind, row.count) for row in step.rows] == [
        ("a", 0, 1),
        ("b", 0, 1),
        ("c", 2, 8),
        ("d", 3, 5),
    ]


def test_a_first_chunk_of_one_token_is_a_prefill() -> None:
    fresh = Row(Sequence(request("a", 8), 0, 4), 1, 0)
    assert fresh.kind == 3
    tail = Sequence(request("a", 8), 0, 4, computed=7)
    assert Row(tail, 1, 7).kind == 0
    assert Row(Sequence(request("a", 8), 0, 4, computed=3), 1, 3).kind == 1


def test_an_image_may_be_split_over_chunks() -> None:
    scheduler = make(max_chunk=3)
    item = span(2, 7, True)
    scheduler.queues.add(request("a", 12, 1, (item,)))
    counts, releases = [], []
    for _ in range(4):
        step, _ = advance(scheduler)
        counts += [row.count for row in step.rows]
        releases.append(source(item).releases)
    assert counts == [3, 3, 3, 3]
    assert releases == [0, 0, 1, 1]


def test_the_most_urgent_keeps_its_memory() -> None:
    """With memory for one and a half requests, the earlier one is never preempted for the later one."""
    scheduler = make(blocks=8, per_block=2, max_seqs=2, host_bytes=0)
    scheduler.queues.add(request("first", 20, 20))
    scheduler.queues.add(request("second", 16, 20))
    order: list[str] = []
    while len(order) < 2:
        step, ended = advance(scheduler)
        order += ended
        assert all(sequence.request_id == "second" for sequence in scheduler.waiting)
    assert order == ["first", "second"]
    assert scheduler.preemption.preemptions >= 1


def test_one_that_waits_for_an_image_is_preempted_first() -> None:
    scheduler = make(blocks=8, per_block=2, max_seqs=4, host_bytes=0)
    scheduler.queues.add(request("stuck", 20, 4, (span(8, 4, False),), priority=5))
    advance(scheduler)
    scheduler.queues.add(request("a", 30, 4))
    step, _ = advance(scheduler)
    assert [row.sequence.request_id for row in step.rows] == ["a"]
    assert [sequence.request_id for sequence in scheduler.waiting] == ["stuck"]


def test_consumed_images_survive_preemption_in_host_memory() -> None:
    """Released rows cannot be computed again: the state is saved although host memory is full."""
    scheduler = make(blocks=8, per_block=2, max_seqs=2, host_bytes=0)
    first, second = span(2, 4, True), span(10, 4, False)
    scheduler.queues.add(request("images", 20, 4, (first, second)))
    advance(scheduler)
    assert source(first).releases == 1
    scheduler.queues.add(request("text", 40, 4))
    step, _ = advance(scheduler)
    assert [save.sequence.request_id for save in step.saves] == ["images"]
    source(second).ready = True
    ended: list[str] = []
    loads = 0
    while len(ended) < 2:
        step, finished = advance(scheduler)
        ended += finished
        loads += len(step.loads)
    assert loads == 1 and scheduler.preemption.recomputes == 0


@pytest.mark.parametrize("host_bytes", [0, 10**6])
def test_budget_smaller_than_rows_starves_nobody(host_bytes: int) -> None:
    scheduler = make(max_seqs=4, max_batched_tokens=2, host_bytes=host_bytes)
    for name in "abcd":
        scheduler.queues.add(request(name, 2, 8))
    served: dict[str, int] = dict.fromkeys("abcd", 0)
    for _ in range(16):
        step, _ = advance(scheduler)
        for row in step.rows:
            served[row.sequence.request_id] += row.count
    assert max(served.values()) - min(served.values()) <= 3


def test_requests_that_cannot_be_computed_again_never_block_each_other() -> None:
    """Both have released their image rows, both need a page, host memory is full: one is swapped anyway."""
    scheduler = make(blocks=5, per_block=1, has_slots=False, max_seqs=2, max_len=16, host_bytes=0)
    for name in ("first", "second"):
        scheduler.queues.add(request(name, 8, 8, (span(1, 3, True),)))
    ended: list[str] = []
    for _ in range(60):
        ended += advance(scheduler)[1]
    assert sorted(ended) == ["first", "second"]
    assert scheduler.preemption.preemptions >= 1 and scheduler.preemption.recomputes == 0


# -- order and waiting -------------------------------------------------------------------------------------------------


def test_a_level_of_priority_is_worth_so_many_steps() -> None:
    """A request that has waited `ageing` steps goes before a new one a level above it, not before one that came
    earlier."""
    scheduler = make(ageing=3)
    ranks = {}
    for step, priority in ((0, 0), (2, 1), (3, 1), (4, 1)):
        while scheduler.queues.step_number < step:
            scheduler.schedule()
        ranks[step] = scheduler.queues.add(request(str(step), 4, priority=priority))
    assert ranks[2].order < ranks[0].order < ranks[3].order < ranks[4].order


def test_priorities_are_bounded() -> None:
    scheduler = make(ageing=1)
    high, higher = (scheduler.queues.add(request(str(p), 4, priority=p)) for p in (100, 2**31 - 1))
    assert high.rank == higher.rank


def test_priorities_are_bounded_from_below_too() -> None:
    scheduler = make(ageing=1)
    low, lower, above = (scheduler.queues.add(request(str(p), 4, priority=p)) for p in (-100, -(2**31), -99))
    assert low.rank == lower.rank == 100 and above.rank == 99


def decoding(scheduler: Scheduler, count: int, output: int = 20, length: int = 3) -> list[Sequence]:
    """Requests that have each drawn a token."""
    found = [scheduler.queues.add(request(f"r{number}", length, output)) for number in range(count)]
    advance(scheduler)
    assert all(sequence.decoding for sequence in found)
    return found


@pytest.mark.parametrize(
    ("budget", "drafts"),
    [(3, [0, 0, 0]), (4, [1, 0, 0]), (5, [2, 0, 0]), (9, [4, 2, 0]), (11, [4, 4, 0]), (15, [4, 4, 4]), (16, [4, 4, 4])],
)
def test_drafts_take_only_what_the_others_leave(budget: int, drafts: list[int]) -> None:
    """Each of three requests has its row first; the rest of the budget goes to drafts, in order."""
    scheduler = make(blocks=30, max_batched_tokens=16)
    sequences = decoding(scheduler, 3)
    scheduler.options = dataclasses.replace(scheduler.options, max_batched_tokens=budget)
    for sequence in sequences:
        sequence.draft.limit = 4
    rows = {row.sequence.request_id: row for row in scheduler.schedule().rows}
    assert [rows[f"r{number}"].drafts for number in range(3)] == drafts
    assert all(row.count == 1 + row.drafts for row in rows.values())


def test_with_more_requests_than_budget_nobody_drafts() -> None:
    scheduler = make(blocks=30, max_batched_tokens=16)
    for sequence in decoding(scheduler, 4):
        sequence.draft.limit = 4
    scheduler.options = dataclasses.replace(scheduler.options, max_batched_tokens=3)
    assert [(row.count, row.drafts) for row in scheduler.schedule().rows] == [(1, 0)] * 3


@pytest.mark.parametrize(("output", "drafts"), [(2, 0), (3, 1), (4, 2), (6, 4), (7, 4)])
def test_no_draft_stands_for_a_token_that_could_not_come(output: int, drafts: int) -> None:
    """One token has been drawn and the row itself draws another, so only the tokens up to `max_tokens` after these can
    be drafts."""
    scheduler = make(blocks=30)
    (sequence,) = decoding(scheduler, 1, output)
    sequence.draft.limit = 4
    (row,) = scheduler.schedule().rows
    assert (row.count, row.drafts) == (1 + drafts, drafts)


def test_nobody_is_preempted_for_a_draft() -> None:
    """There is a page for the row itself, but not for its drafts."""
    scheduler = make(blocks=2 + 8, per_block=1, max_seqs=2)
    first, _ = decoding(scheduler, 2)
    scheduler.pool.take_pages(scheduler.pool.free_blocks)
    first.draft_limit = 4
    rows = {row.sequence.request_id: row.drafts for row in scheduler.schedule().rows}
    assert rows == {"r0": 0, "r1": 0} and scheduler.preemption.preemptions == 0


def test_one_that_waits_for_an_image_is_preempted_before_less_urgent_ones_that_run() -> None:
    """Four run; the second needs a page. The first waits for an image, the fourth is the least urgent: the first is
    preempted. If none waits, the least urgent one after it is preempted, never one before it."""
    scheduler = make(blocks=4 + 16, per_block=1, host_bytes=0, max_batched_tokens=32)
    stuck, *others = (
        scheduler.queues.add(item)
        for item in (request("stuck", 16, 4, (span(12, 4, False),)), *(request(n, 3, 9) for n in "abc"))
    )
    advance(scheduler)
    assert len(scheduler.running) == 4
    assert scheduler.preemption.victim(others[0]) is stuck
    assert scheduler.preemption.victim(others[2]) is stuck, "also by the least urgent"
    source(stuck.request.spans[0]).ready = True
    assert scheduler.preemption.victim(others[0]) is others[2]
    assert scheduler.preemption.victim(stuck) is others[2]
    assert scheduler.preemption.victim(others[2]) is others[2], "itself, rather than one that is more urgent"


def test_of_two_that_wait_for_images_the_less_urgent_is_preempted() -> None:
    scheduler = make(blocks=20, per_block=1, host_bytes=0, max_batched_tokens=32)
    first = scheduler.queues.add(request("first", 16, 4, (span(8, 4, False),)))
    second = scheduler.queues.add(request("second", 16, 4, (span(8, 4, False),)))
    runs = scheduler.queues.add(request("runs", 3, 9))
    advance(scheduler)
    assert scheduler.preemption.victim(runs) is second
    scheduler.schedule([second])
    assert scheduler.preemption.victim(runs) is first


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    """One batch slot, and in each step a new request of a higher level: the other one still ends."""
    scheduler = make(max_seqs=1, ageing=6)
    scheduler.queues.add(request("patient", 4, 2))
    for number in range(100):
        scheduler.queues.add(request(f"urgent {number}", 4, 2, priority=1))
        if "patient" in advance(scheduler)[1]:
            assert number > 6
            return
    raise AssertionError("it has not ended in 100 steps")


def test_a_request_enters_only_with_room_for_those_that_run_to_grow() -> None:
    """Memory for both prompts and not a page more: the second waits for the end of the first, and none is preempted."""
    scheduler = make(blocks=2 + 5, per_block=1, max_seqs=2, max_len=20, host_bytes=0)
    scheduler.queues.add(request("first", 12, 8))
    scheduler.queues.add(request("second", 8, 4))
    ended: list[str] = []
    while len(ended) < 2:
        step, finished = advance(scheduler)
        assert len(step.rows) == 1
        ended += finished
    assert ended == ["first", "second"] and scheduler.preemption.preemptions == 0


@pytest.mark.parametrize("cache", [False, True], ids=["plain", "cache"])
@pytest.mark.parametrize("stuck", [False, True], ids=["decoding", "waiting-for-images"])
def test_a_step_costs_the_same_however_many_pages_are_held(cache: bool, stuck: bool) -> None:
    """Eight requests that hold 8 or 200 pages each, and one more for which there is no memory."""

    def cost(pages: int) -> int:
        options: dict[str, Any] = {"page_size": 2, "max_len": 4096, "max_batched_tokens": 8192, "max_seqs": 16}
        pool = SuperblockPool(8 * pages + 40, 1)
        chosen = DecoderOptions(**options, state_cache="align" if cache else "none", state_block=8)
        kept = PrefixCache(pool, Placement("align", 8, 8, 2), page_bytes=10, slot_bytes=20) if cache else None
        scheduler = Scheduler(chosen, pool, page_bytes=10, slot_bytes=20, cache=kept)
        for number in range(8):
            late = (span(2 * pages - 3, 2, False),) if stuck and number % 4 == 3 else ()
            wanted = request(str(number), 2 * pages - 1, 900, late)
            # The salt keeps them from sharing pages.
            scheduler.queues.add(dataclasses.replace(wanted, salt=bytes([number])))

        def step() -> None:
            scheduler.commit(done := scheduler.schedule())
            for row in done.rows:
                row.sequence.tokens += [1] * row.samples

        for _ in range(3):
            step()
        if kept is not None:
            kept.clear()
        scheduler.queues.add(request("large", 12 * pages, 4))
        step()
        found = lines_run(step)
        assert len(scheduler.running) == 8
        scheduler.check_integrity()
        return found

    few, many = cost(8), cost(200)
    assert many <= 1.1 * few, f"{few} lines with 8 pages a request, {many} with 200"


def test_a_step_costs_the_same_however_many_samples_wait_for_their_prompt() -> None:
    """Ten prompts, and memory for one of them. What others wait for is decided once for all of their samples."""

    def cost(samples: int) -> int:
        scheduler = make(blocks=6, max_seqs=2)
        for number in range(10):
            first = scheduler.queues.add(request(f"{number}/0", 12, 12))
            for index in range(1, samples):
                scheduler.queues.add(request(f"{number}/{index}", 12, 12), first)
        advance(scheduler)
        stats = scheduler.stats()
        assert stats["running"] and stats["running"] + stats["waiting"] == 10 * samples
        return lines_run(scheduler.schedule)

    few, many = cost(2), cost(50)
    assert many <= 1.1 * few, f"{few} lines with 2 samples of each prompt, {many} with 50"


def test_a_step_costs_the_same_however_many_patches_waiting_clips_have() -> None:
    """Ten requests with a clip each, which is not ready. One that fails is found all the same."""

    def cost(patches: int) -> int:
        scheduler = make(max_len=2048)
        for number in range(10):
            spans = [span(start, 1, False) for start in range(patches)]
            for part in spans[:-1]:
                part.complete = False
            scheduler.queues.add(request(str(number), 1500, 12, tuple(spans)))
        found = lines_run(lambda: (scheduler.runnable, scheduler.schedule()))
        for part in spans:
            part.error = ValueError("broken")
        assert scheduler.runnable and [s.request_id for s, _ in scheduler.schedule().failed] == ["9"]
        return found

    few, many = cost(2), cost(500)
    assert many <= 1.1 * few, f"{few} lines with 2 temporal patches in each clip, {many} with 500"


def test_samples_enter_by_urgency_whichever_way_they_come_to_wait() -> None:
    """A sample that no longer waits for the first one, which has left, keeps its place before later requests."""
    scheduler = make(max_seqs=1)
    first = scheduler.queues.add(request("first/0", 5))
    second = scheduler.queues.add(request("first/1", 5), first)
    third = scheduler.queues.add(request("first/2", 5), first)
    scheduler.queues.add(request("later", 5))
    scheduler.queues.add(request("urgent", 5, priority=2))
    scheduler.queues.remove(first)
    scheduler.queues.ungroup(third)
    assert [sequence.request_id for sequence in scheduler.waiting] == ["urgent", "first/1", "first/2", "later"]
    scheduler.queues.remove(second)
    ended = [name for _ in range(40) for name in advance(scheduler)[1]]
    assert ended == ["urgent", "first/2", "later"]


def test_the_first_in_order_is_never_preempted_for_want_of_a_place_in_host_memory() -> None:
    """The image rows of the other request are consumed and host memory is full: it is swapped although that exceeds the
    limit."""
    scheduler = make(blocks=2 + 9, per_block=1, max_seqs=2, max_len=36, host_bytes=0)
    scheduler.queues.add(request("first", 12, 20))
    scheduler.queues.add(request("second", 16, 12, (span(1, 3, True),)))
    while [*scheduler.queues]:
        step, _ = advance(scheduler)
        assert 0 not in step.preempted
    assert scheduler.preemption.preemptions > 0 and scheduler.preemption.recomputes == 0


@pytest.mark.parametrize(("host_bytes", "saved"), [(49, False), (50, True), (99, True), (None, True)])
def test_host_memory_holds_exactly_what_fits(host_bytes: int | None, saved: bool) -> None:
    """A state of 20 bytes and three pages of 10."""
    scheduler = make(blocks=20, host_bytes=host_bytes)
    first, second = (scheduler.queues.add(request(name, 12, 4)) for name in ("first", "second"))
    scheduler.options = dataclasses.replace(scheduler.options, max_batched_tokens=24)
    advance(scheduler)
    step = scheduler.schedule([first, second])
    if host_bytes is None:
        assert scheduler.memory.host.limit == 20 * 20 // 4 == 100 and len(step.saves) == 2
    else:
        assert [save.sequence for save in step.saves] == [first] * saved, "there is room for one, or none"
    assert scheduler.preemption.recomputes == 2 - len(step.saves) and scheduler.preemption.preemptions == 2


def test_preempted_twice_at_once_is_preempted_once() -> None:
    scheduler = make()
    sequence = scheduler.queues.add(request("a", 4))
    scheduler.commit(scheduler.schedule([sequence]))
    assert scheduler.preemption.preemptions == 0, "it did not run"
    scheduler.schedule([sequence, sequence])
    assert scheduler.preemption.preemptions == 1
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "output", "max_tokens", "message"),
    [
        (0, 0, 4, "prompt is empty"),
        (48, 0, 4, "48 tokens with 0 output tokens .* max_len 48: at most 47 "),
        (44, 4, 9, "44 tokens with 4 output tokens .* at most 43 "),
        (10, 4, 4, "max_tokens 4 is not above the 4 output"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(
    prompt: int, output: int, max_tokens: int, message: str
) -> None:
    wanted = dataclasses.replace(request("a", prompt, max_tokens), output_ids=[1] * output)
    scheduler = make()
    with pytest.raises(ValueError, match=message):
        scheduler.queues.add(wanted)
    assert not [*scheduler.queues]


@pytest.mark.parametrize(("prompt", "output", "max_tokens", "limit"), [(47, 0, 9, 1), (43, 4, 9, 5), (10, 3, 4, 4)])
def test_what_can_just_be_served_is_taken(prompt: int, output: int, max_tokens: int, limit: int) -> None:
    wanted = dataclasses.replace(request("a", prompt, max_tokens), output_ids=[1] * output)
    assert make().queues.add(wanted).limit == limit


@pytest.mark.parametrize(
    ("spans", "ok"),
    [
        ([(0, 4), (4, 4)], True),
        ([(0, 8)], True),
        ([(0, 9)], False),
        ([(0, 4), (3, 4)], False),
        ([(4, 2), (0, 2)], False),
        ([(2, 0)], False),
    ],
)
def test_image_rows_lie_in_the_prompt_in_order_and_apart(spans: list[tuple[int, int]], ok: bool) -> None:
    wanted = request("a", 8, 4, tuple(span(start, length, False) for start, length in spans))
    if ok:
        make().queues.add(wanted)
        return
    with pytest.raises(ValueError, match="do not lie in the prompt of 8 tokens"):
        make().queues.add(wanted)


@pytest.mark.parametrize(("output", "kept"), [(4, [8]), (5, [8, 12])])
def test_an_answer_is_kept_where_it_saves_a_page(output: int, kept: list[int]) -> None:
    """The prompt of nine tokens leaves a state after eight; the answer's state is kept from four more tokens on."""
    scheduler = cached(blocks=40, state_block=4)
    assert scheduler.cache is not None
    scheduler.cache.placement = dataclasses.replace(scheduler.cache.placement, mode="auto", chunk=4)
    sequence = scheduler.queues.add(request("a", 9, 9))
    while sequence.computed < 8 + output - 1:
        step = scheduler.schedule()
        scheduler.commit(step)
        sequence.tokens.append(1)
    scheduler.keep(sequence)
    scheduler.finish(sequence)
    assert scheduler.cache.lengths() == kept
    scheduler.check_integrity()


# -- chunks and images -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "total", "budget", "ready", "align", "end"),
    [
        pytest.param(0, 20, 20, 20, 8, 20, id="whole"),
        pytest.param(0, 20, 12, 20, 8, 8, id="aligned"),
        pytest.param(0, 20, 5, 20, 8, 5, id="progress-below-a-block"),
        pytest.param(5, 20, 5, 20, 8, 8, id="back-to-the-grid"),
        pytest.param(0, 20, 12, 6, 8, 6, id="aligned-then-capped"),
        pytest.param(6, 20, 8, 6, 8, 6, id="nothing-is-ready"),
        pytest.param(8, 20, 12, 20, 8, 20, id="last-chunk-ends-anywhere"),
    ],
)
def test_chunk_ends(start: int, total: int, budget: int, ready: int, align: int, end: int) -> None:
    assert chunk_end(start, total, budget, ready, align) == end


def test_two_images_in_less_room_than_both_take() -> None:
    """Block 8, memory for six rows, images at [0, 5) and [6, 11): the first is released after [0, 6), so that the
    second can be encoded; the next chunk ends on the grid again."""
    scheduler = cached(state_block=8, max_batched_tokens=8, page_size=8)
    first, second = span(0, 5, True), span(6, 5, False)
    scheduler.queues.add(request("a", 24, 1, (first, second)))
    rows: list[tuple[int, int]] = []
    while len(rows) < 4:
        room = 6 - 5 * (not source(first).releases) - 5 * (source(second).ready and not source(second).releases)
        if room >= 5:
            source(second).ready = True
        step, _ = advance(scheduler)
        assert step.rows, "nothing advances and nothing is released"
        rows += [(row.start, row.end) for row in step.rows]
    assert rows == [(0, 6), (6, 8), (8, 16), (16, 24)]


def test_two_images_of_11844_tokens_against_16384() -> None:
    """Each pass advances the request or releases rows, with the whole block larger than the rest of a chunk."""
    size, bound = 11_844, 16_384
    scheduler = cached(
        blocks=4000, per_block=64, max_len=32_768, max_batched_tokens=8192, page_size=16, state_block=528
    )
    spans = (span(10, size, True), span(20 + size, size, False))
    scheduler.queues.add(request("a", 2 * size + 64, 1, spans))
    for _ in range(12):
        held = sum(item.length for item in spans if source(item).ready and not source(item).releases)
        if held + size <= bound:
            source(spans[1]).ready = True
        step, ended = advance(scheduler)
        assert step.rows, "a pass that neither advances nor frees"
        if ended:
            return
    raise AssertionError("it has not ended")


def cached(blocks: int = 12, per_block: int = 2, **options: Any) -> Scheduler:
    """A scheduler with a prefix cache under `align`."""
    chosen: dict[str, Any] = {"max_seqs": 4, "max_len": 48, "max_batched_tokens": 16, "page_size": 4} | options
    chosen |= {"state_cache": "align"}
    pool = SuperblockPool(blocks, per_block, True)
    # The reference's block of 528 tokens is no power of two, and no chunk of a scan: here only the grid counts.
    placement = Placement("align", chosen["state_block"], 8, chosen["page_size"])
    cache = PrefixCache(pool, placement, page_bytes=10, slot_bytes=20)
    return Scheduler(DecoderOptions(**chosen), pool, page_bytes=10, slot_bytes=20, cache=cache)


def test_nothing_is_evicted_for_what_would_not_fit_anyway() -> None:
    scheduler = cached(blocks=12, per_block=2, state_block=4)
    scheduler.queues.add(request("a", 17, 2))
    while [*scheduler.queues]:
        advance(scheduler)
    assert scheduler.cache is not None and scheduler.cache.lengths()
    kept = scheduler.cache.lengths()
    assert (
        not scheduler.memory.reclaim(0, 2 * 12 + 1)
        and not scheduler.memory.reclaim(13, 0)
        and not scheduler.memory.reclaim(12, 1)
    )
    assert scheduler.cache.lengths() == kept
    assert scheduler.memory.reclaim(11, 2) and not scheduler.cache.lengths()


def test_no_more_is_evicted_than_room_takes() -> None:
    scheduler = cached(blocks=12, per_block=2, state_block=4)
    for name in "ab":
        wanted = dataclasses.replace(request(name, 9, 1), salt=name.encode())
        scheduler.queues.add(wanted)
        advance(scheduler)
    assert scheduler.cache is not None and scheduler.cache.lengths() == [8, 8]
    free = scheduler.pool.free_blocks
    assert scheduler.memory.reclaim(free, 0) and scheduler.cache.lengths() == [8, 8]
    assert scheduler.memory.reclaim(free + 1, 0) and scheduler.cache.lengths() == [8]
    scheduler.check_integrity()


# -- deadlines ---------------------------------------------------------------------------------------------------------


def test_pace_is_the_best_of_the_last_steps() -> None:
    pace = Pace()
    assert pace.seconds(10**6, 10) == 0.0
    pace.observe(100, 1.0)
    pace.observe(1, 0.25)
    assert pace.seconds(200, 4) == 2.0 + 4 * 0.25
    for _ in range(64):
        pace.observe(10, 1.0)
    assert pace.seconds(200, 4) == 20.0 + 4.0


def test_prompts_before_it_count_and_what_is_computed_does_not() -> None:
    scheduler = make(max_batched_tokens=4, max_seqs=1)
    scheduler.queues.add(request("running", 12, 4))
    advance(scheduler)
    later = scheduler.queues.add(request("later", 10, 4))
    scheduler.queues.add(request("after", 20, 4))
    assert [scheduler.missing(sequence) for sequence in scheduler.ahead(later)] == [10, 8]
    urgent = scheduler.queues.add(request("urgent", 5, 4, priority=1))
    assert [scheduler.missing(sequence) for sequence in scheduler.ahead(urgent)] == [5]
