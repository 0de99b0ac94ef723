"""Random programs over arena, cache and scheduler together: every row must find exactly its own states and keys.

Memory is simulated by dictionaries that record, for each slot and each place of a page, which prefix was computed
there. So a stale, shared or lost piece of memory is detected in the step that reads it, without a model. In half of the
programs, a step is scheduled before the tokens of the previous one are known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from gated_decoder import grid_positions
from hypothesis import seed as with_seed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tiny_decoder import FakeSource

from decoder.blocks import SuperblockPool
from decoder.checkpoints import Placement
from decoder.config import DecoderOptions
from decoder.flight import expect
from decoder.positions import positions_of
from decoder.prefix_cache import PrefixCache
from decoder.request import DecoderRequest, EmbeddingSource
from decoder.sampling import SamplingParams
from decoder.scheduler import Scheduler
from decoder.sequence import UNREAD, Sequence, Status
from decoder.step import Fork, Step

PAGE, MAX_LEN = 4, 40
PROGRAM = 35
"""Maximum number of rules per program."""
END = 63
"""A token that ends its request."""
Prefix = tuple[Any, ...]


class Memory:
    """What each slot and page contains: applies the effects of a step in the runner's order."""

    def __init__(self) -> None:
        self.slots: dict[int, Prefix] = {}
        self.places: dict[tuple[int, int], Prefix] = {}
        self.host: dict[str, tuple[Prefix, dict[int, Prefix]]] = {}

    def move(self, step: Step) -> None:
        for sequence, slot, pages, _ in step.saves:
            kept = {i * PAGE + o: self.places.get((page, o), ()) for i, page in enumerate(pages) for o in range(PAGE)}
            self.host[sequence.request_id] = self.slots.get(slot, ()), kept
        for page in step.new_pages:
            for offset in range(PAGE):
                self.places.pop((page, offset), None)
        for source, target in step.page_copies:
            for offset in range(PAGE):
                self.places[target, offset] = self.places.get((source, offset), ())
        for source, target in step.slot_copies:
            self.slots[target] = self.slots[source]
        for sequence in step.loads:
            state, kept = self.host.pop(sequence.request_id)
            self.slots[sequence.slot] = state
            for position, prefix in kept.items():
                self.places[sequence.held.pages[position // PAGE], position % PAGE] = prefix

    def split(self, forks: Iterable[Fork]) -> None:
        for fork in forks:
            if fork.slots[0] >= 0:
                self.slots[fork.slots[1]] = self.slots[fork.slots[0]]
            for offset in range(PAGE if fork.pages else 0):
                source, target = fork.pages or (-1, -1)
                self.places[target, offset] = self.places.get((source, offset), ())

    def compute(self, step: Step, has_slots: bool, has_pages: bool) -> None:
        for row in step.rows:
            sequence, content = row.sequence, contents(row.sequence)
            if row.end > sequence.known and drawn(sequence, row.end - 1) == END:
                continue  # padding: the sequence has ended, which the host does not know yet
            if has_slots and row.start:
                assert self.slots[sequence.slot] == content[: row.start], "another state than its own"
            for position in range(row.end if has_pages else 0):
                place = sequence.held.pages[position // PAGE], position % PAGE
                if position >= row.start:
                    self.places[place] = content[: position + 1]
                else:
                    assert self.places[place] == content[: position + 1], "other keys than its own"
            if has_slots:
                self.slots[sequence.slot] = content[: row.end]
                for position, slot in step.checkpoints.get(sequence.arrival, ()):
                    assert row.start < position <= row.end
                    self.slots[slot] = content[:position]


def drawn(sequence: Sequence, at: int) -> int:
    """The token that is drawn for a position."""
    return END if sequence.arrival % 4 == 1 and at == sequence.prompt_len + 1 else sequence.arrival % 3 + 60


def contents(sequence: Sequence) -> Prefix:
    """The identity of each token: its salt, its id or image row, and its positions."""
    units: list[Any] = [drawn(sequence, at) if id_ == UNREAD else id_ for at, id_ in enumerate(sequence.tokens)]
    for span in sequence.request.spans:
        for row in range(span.end - span.start):
            units[span.start + row] = (span.key, row)
    positions = positions_of(sequence.request.positions, 0, len(units), 3)
    return tuple((sequence.request.salt, unit, at) for unit, at in zip(units, positions, strict=True))


class Wait:
    """How many steps a request may wait, by the formula of `decoder.scheduler`, and how many are left."""

    def __init__(self, extra: int) -> None:
        """`extra`: number of steps of each request that compute nothing, because the host learns one step later that it
        has ended."""
        self.counted: set[str] = set()
        self.extra = extra
        self.tokens = 0
        self.steps = 0

    def count(self, others: Iterable[Sequence]) -> None:
        """Adds requests that it may have to wait for, with all that they still have to compute."""
        for other in others:
            if other.request_id not in self.counted:
                self.counted.add(other.request_id)
                self.tokens += other.prompt_len + other.limit + self.extra


class CacheMachine(RuleBasedStateMachine):
    """Requests with few different prefixes arrive, generate, are cancelled and end, in memory for two or three of
    them."""

    rules_applied: ClassVar[int] = 0

    @initialize(
        mode=st.sampled_from(["align", "all", "auto", "none"]),
        kind=st.sampled_from(["both", "both", "states", "pages"]),
        spare=st.integers(0, 4),
        per_block=st.integers(1, 5),
        budget=st.sampled_from([1, 5, 16, 64]),
        host_bytes=st.sampled_from([0, 90, 10**6]),
        checkpoint_bytes=st.sampled_from([None, None, 0, 20, 59]),
        max_seqs=st.integers(1, 4),
        ageing=st.sampled_from([1, 5, 100]),
        overlap=st.booleans(),
    )
    def start(
        self,
        mode: str,
        kind: str,
        spare: int,
        per_block: int,
        budget: int,
        host_bytes: int,
        checkpoint_bytes: int | None,
        max_seqs: int,
        ageing: int,
        overlap: bool,
    ) -> None:
        self.overlap = overlap
        self.leaving: list[Sequence] = []
        self.flight: list[tuple[Sequence, int, bool]] | None = None
        self.has_slots, self.has_pages = kind != "pages", kind != "states"
        blocks = self.has_slots + (-(-(MAX_LEN // PAGE) // per_block) if self.has_pages else 0) + spare
        self.pool = SuperblockPool(blocks, per_block if self.has_pages else 0, self.has_slots)
        options = DecoderOptions(
            max_seqs=max_seqs, max_len=MAX_LEN, max_batched_tokens=budget, page_size=PAGE, host_bytes=host_bytes,
            state_cache=mode, state_block=PAGE, ageing=ageing, checkpoint_bytes=checkpoint_bytes,
        )  # fmt: skip
        placement = Placement(mode, PAGE, 8, PAGE, self.has_slots)
        sizes = {"page_bytes": 10 * self.has_pages, "slot_bytes": 20 * self.has_slots}
        self.cache = None if mode == "none" else PrefixCache(self.pool, placement, **sizes)
        self.scheduler = Scheduler(options, self.pool, cache=self.cache, **sizes)
        self.memory = Memory()
        self.sources: list[FakeSource] = []
        self.alive: dict[str, Sequence] = {}
        self.waits: dict[str, Wait] = {}
        self.rounds = -(-max_seqs // budget)
        self.names = 0

    @rule(
        prefix=st.integers(0, 2),
        length=st.integers(1, 30),
        end=st.integers(0, 2),
        output=st.integers(1, 9),
        image=st.sampled_from([None, None, "ready", "late"]),
        image_key=st.integers(0, 1),
        grid=st.sampled_from([None, (1, 6), (2, 3), (3, 2)]),
        priority=st.integers(0, 1),
        hint=st.integers(0, 30),
        samples=st.sampled_from([1, 1, 2, 3]),
    )
    def add(
        self,
        prefix: int,
        length: int,
        end: int,
        output: int,
        image: str | None,
        image_key: int,
        grid: tuple[int, int] | None,
        priority: int,
        hint: int,
        samples: int,
    ) -> None:
        """Adds one request, or several samples of one prompt."""
        if len(self.alive) >= 8:
            return
        prompt = [prefix] * (length - 1) + [50 + end]
        leader: Sequence | None = None
        for _ in range(samples):
            spans: tuple[EmbeddingSource, ...] = ()
            if image is not None and length >= 12:
                source = FakeSource(3, 6, b"image%d" % image_key, ready=image == "ready")
                self.sources.append(source)
                spans = (source,)
            positions = grid_positions(length, (3, *grid)) if spans and grid is not None else None
            self.names += 1
            item = DecoderRequest(
                str(self.names), prompt, SamplingParams(max_tokens=output), spans, priority=priority,
                checkpoint_at=(hint,), salt=b"salt" if prefix == 2 else b"", positions=positions,
            )  # fmt: skip
            sequence = self.scheduler.queues.add(item, leader)
            leader = leader or sequence
            self.alive[item.request_id] = sequence
            self.waits[item.request_id] = Wait(extra=int(self.overlap))

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        for span in sequence.request.spans[sequence.next_span :]:
            span.release()
        self.memory.host.pop(sequence.request_id, None)
        del self.alive[sequence.request_id], self.waits[sequence.request_id]

    @rule()
    def step(self) -> None:
        self.advance()

    def advance(self) -> bool:
        if self.scheduler.needs_ids:
            self.collect()
        before = {name: sequence.computed for name, sequence in self.alive.items()}
        self.expect()
        step, self.leaving = self.scheduler.schedule(self.leaving), []
        self.hold_to(step, before)
        self.memory.move(step)
        self.memory.compute(step, self.has_slots, self.has_pages)
        led = [row for row in step.rows if row.samples and row.sequence.followers]
        forks = [fork for row in led for fork in self.scheduler.forks.fork(row, step)]
        self.memory.split(forks)
        self.scheduler.commit(step)
        flight = [(row.sequence, row.end, row.samples) for row in step.rows]
        flight += [(fork.follower, fork.follower.prompt_len, True) for fork in forks]
        expect(sequence for sequence, _, samples in flight if samples)
        self.collect()
        self.flight = flight
        if not self.overlap or not step.rows:
            self.collect()
        return bool(step.rows)

    def collect(self) -> None:
        """The tokens drawn by the last step become known."""
        flight, self.flight = self.flight or [], None
        for sequence, end, samples in flight:
            if self.alive.get(sequence.request_id) is not sequence:
                continue
            while sequence.next_span < len(sequence.request.spans):
                span = sequence.request.spans[sequence.next_span]
                if span.end > min(end, sequence.computed):
                    break
                span.release()
                sequence.next_span += 1
            if not samples:
                continue
            sequence.tokens[end] = drawn(sequence, end)
            sequence.unread -= 1
            if sequence.tokens[end] == END or end + 1 - sequence.prompt_len >= sequence.limit:
                del sequence.tokens[end + 1 :]
                sequence.unread, sequence.computed = 0, min(sequence.computed, end)
                copy = self.scheduler.keep(sequence)
                if copy is not None:
                    self.memory.slots[copy[1]] = self.memory.slots[copy[0]]
                self.end(sequence)

    def expect(self) -> None:
        """Before a step: records which requests each request may have to wait for."""
        alive = self.alive.values()
        for name, sequence in self.alive.items():
            group = [sequence] if sequence.leader is None else [sequence, sequence.leader]
            ready = all(span.ready for one in group for span in one.request.spans[one.next_span :])
            wait = self.waits[name]
            wait.count(other for other in alive if other.order <= sequence.order)
            if sequence.status is not Status.RUNNING or not ready:
                wait.count(self.scheduler.running)
            wait.steps += ready

    def hold_to(self, step: Step, before: dict[str, int]) -> None:
        """After a step: adds what is computed again, and checks that no request has waited longer than allowed."""
        lost = {name: before[name] - s.computed + 1 for name, s in self.alive.items() if s.arrival in step.preempted}
        for wait in self.waits.values():
            wait.tokens += sum(tokens for name, tokens in lost.items() if name in wait.counted)
            assert wait.steps <= self.rounds * wait.tokens, "it has waited longer than the formula allows"

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.leaving.append(self.alive[data.draw(st.sampled_from(sorted(self.alive)))])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(self.alive[data.draw(st.sampled_from(sorted(self.alive)))])

    @precondition(lambda self: self.cache is not None)
    @rule()
    def evict(self) -> None:
        assert self.cache is not None
        self.cache.evict()

    @precondition(lambda self: any(not source.ready for source in self.sources))
    @rule()
    def image_comes(self) -> None:
        next(source for source in self.sources if not source.ready).ready = True

    @invariant()
    def adds_up(self) -> None:
        CacheMachine.rules_applied += 1
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            if self.cache is not None and self.has_slots:
                used = sum(self.pool.slot_owners(slot) > 0 for slot in range(self.pool.num_blocks))
                assert used == len(self.scheduler.running) + len(self.cache.slots)

    @invariant()
    def what_is_cached_is_what_it_says(self) -> None:
        """Each cached state was computed for the prefix length under which the cache lists it."""
        if hasattr(self, "scheduler") and self.cache is not None and self.has_slots:
            for checkpoint in self.cache.order:
                assert len(self.memory.slots[checkpoint.slot]) == checkpoint.tokens

    def teardown(self) -> None:
        """Ends all requests; while the scheduler reports work, each step must make progress; nothing may be left."""
        if not hasattr(self, "scheduler"):
            return
        idle = 0
        for _ in range(4000):
            if not self.alive:
                break
            if not self.scheduler.runnable and self.flight is None:
                next(source for source in self.sources if not source.ready and not source.releases).ready = True
            idle = 0 if self.advance() else idle + 1
            assert idle < 3, "nothing advances although something could"
            self.scheduler.check_integrity()
        assert not self.alive and self.scheduler.memory.host.used == 0
        if self.cache is not None:
            self.cache.clear()
        assert self.pool.free_blocks == self.pool.num_blocks


def run_machine(steps: int, *, seed: int, derandomize: bool = False) -> int:
    """Runs random programs until `steps` rules have been applied; returns their number. Raises what a rule raises,
    after hypothesis has found the shortest failing program."""
    CacheMachine.rules_applied = 0
    while CacheMachine.rules_applied < steps:
        examples = max(1, -(-(steps - CacheMachine.rules_applied) // PROGRAM))
        chosen = settings(
            max_examples=examples, stateful_step_count=PROGRAM, deadline=None, database=None, derandomize=derandomize
        )
        run_state_machine_as_test(with_seed(seed)(CacheMachine), settings=chosen)
        seed += 1
    return CacheMachine.rules_applied
