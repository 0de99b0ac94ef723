"""The scheduler alone: every request ends, nothing is lost, the budget holds, rows are in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_decoder import FakeSource

from decoder.blocks import SuperblockPool
from decoder.config import DecoderOptions
from decoder.request import DecoderRequest, ImageSpan, Sequence
from decoder.sampling import SamplingParams
from decoder.scheduler import Row, Scheduler, Step


def make(blocks: int = 12, per_block: int = 2, has_slots: bool = True, **options: Any) -> Scheduler:
    chosen = {"max_seqs": 4, "max_len": 48, "max_batched_tokens": 16, "page_size": 4} | options
    return Scheduler(
        DecoderOptions(**chosen), SuperblockPool(blocks, per_block, has_slots), page_bytes=10, slot_bytes=20
    )


def request(
    name: str, length: int, output: int = 4, spans: tuple[ImageSpan, ...] = (), priority: int = 0
) -> DecoderRequest:
    return DecoderRequest(name, [1] * length, SamplingParams(max_tokens=output), spans, priority=priority)


def span(start: int, length: int, ready: bool) -> ImageSpan:
    return ImageSpan(start, length, b"key", FakeSource(ready=ready))


def source(item: ImageSpan) -> FakeSource:
    assert isinstance(item.source, FakeSource)
    return item.source


def advance(scheduler: Scheduler) -> tuple[Step, list[str]]:
    """One step as the runner does it, with 1 for every drawn token. Who ended."""
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
            item.source.release()
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
        assert len(row.sequence.pages) * options.page_size >= row.end or not scheduler.pool.pages_per_block
        assert row.sequence.seat >= 0
        for item in row.sequence.request.spans:
            if item.start < row.end and item.end > row.start:
                assert item.source.ready and source(item).releases == 0
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
    spans: list[ImageSpan] = []
    for index, (length, output, images, priority) in enumerate(wanted):
        own = tuple(span(3 + 8 * i, 5, False) for i in range(images) if 8 + 8 * i <= length)
        spans += own
        scheduler.add(request(str(index), length, output, own, priority))
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
    assert scheduler.pool.free_blocks == blocks and scheduler.host_used == 0


def test_rows_of_a_mixed_step() -> None:
    """Decode rows come first, in order of their slots; then the tail of a prompt, then new prompts."""
    scheduler = make(blocks=16, max_batched_tokens=40)
    for name, length in (("a", 3), ("b", 3)):
        scheduler.add(request(name, length))
    advance(scheduler)
    scheduler.add(request("c", 46, 2))
    advance(scheduler)
    scheduler.add(request("d", 5))
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
    scheduler.add(request("a", 12, 1, (item,)))
    counts, releases = [], []
    for _ in range(4):
        step, _ = advance(scheduler)
        counts += [row.count for row in step.rows]
        releases.append(source(item).releases)
    assert counts == [3, 3, 3, 3]
    assert releases == [0, 0, 1, 1]


def test_the_most_urgent_keeps_its_memory() -> None:
    """Memory for one and a half: the earlier request is never put out for the later one."""
    scheduler = make(blocks=8, per_block=2, max_seqs=2, host_bytes=0)
    scheduler.add(request("first", 20, 20))
    scheduler.add(request("second", 16, 20))
    order: list[str] = []
    while len(order) < 2:
        step, ended = advance(scheduler)
        order += ended
        assert all(sequence.request_id == "second" for sequence in scheduler.waiting)
    assert order == ["first", "second"]
    assert scheduler.preemptions >= 1


def test_one_that_waits_for_an_image_is_put_out_first() -> None:
    scheduler = make(blocks=8, per_block=2, max_seqs=4, host_bytes=0)
    scheduler.add(request("stuck", 20, 4, (span(8, 4, False),), priority=5))
    advance(scheduler)
    scheduler.add(request("a", 30, 4))
    step, _ = advance(scheduler)
    assert [row.sequence.request_id for row in step.rows] == ["a"]
    assert [sequence.request_id for sequence in scheduler.waiting] == ["stuck"]


def test_consumed_images_survive_preemption_in_host_memory() -> None:
    """Rows that were given back cannot be computed again: the state is saved although the host tier is full."""
    scheduler = make(blocks=8, per_block=2, max_seqs=2, host_bytes=0)
    first, second = span(2, 4, True), span(10, 4, False)
    scheduler.add(request("images", 20, 4, (first, second)))
    advance(scheduler)
    assert source(first).releases == 1
    scheduler.add(request("text", 40, 4))
    step, _ = advance(scheduler)
    assert [sequence.request_id for sequence, _, _ in step.saves] == ["images"]
    source(second).ready = True
    ended: list[str] = []
    loads = 0
    while len(ended) < 2:
        step, finished = advance(scheduler)
        ended += finished
        loads += len(step.loads)
    assert loads == 1 and scheduler.recomputes == 0


@pytest.mark.parametrize("host_bytes", [0, 10**6])
def test_budget_smaller_than_rows_starves_nobody(host_bytes: int) -> None:
    scheduler = make(max_seqs=4, max_batched_tokens=2, host_bytes=host_bytes)
    for name in "abcd":
        scheduler.add(request(name, 2, 8))
    served: dict[str, int] = dict.fromkeys("abcd", 0)
    for _ in range(16):
        step, _ = advance(scheduler)
        for row in step.rows:
            served[row.sequence.request_id] += row.count
    assert max(served.values()) - min(served.values()) <= 3


def test_requests_that_cannot_be_computed_again_never_block_each_other() -> None:
    """Both have given their image rows back, both want a page, the host tier is full: one is swapped all the same."""
    scheduler = make(blocks=5, per_block=1, has_slots=False, max_seqs=2, max_len=16, host_bytes=0)
    for name in ("first", "second"):
        scheduler.add(request(name, 8, 8, (span(1, 3, True),)))
    ended: list[str] = []
    for _ in range(60):
        ended += advance(scheduler)[1]
    assert sorted(ended) == ["first", "second"]
    assert scheduler.preemptions >= 1 and scheduler.recomputes == 0
