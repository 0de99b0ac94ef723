"""Admission: which waiting sequences start, and from which cached prefix."""

from __future__ import annotations

import time
from typing import NamedTuple

from decoder.cached import MISS, Hit
from decoder.checkpointing import Checkpointing
from decoder.config import DecoderOptions
from decoder.memory import SequenceMemory
from decoder.metadata import chunk_end
from decoder.preemption import Preemption
from decoder.prefix_cache import PrefixCache
from decoder.queues import Queues
from decoder.sequence import Sequence, Status
from decoder.step import Row, Step


class Start(NamedTuple):
    """The cached prefix that a sequence starts from, with the memory for it."""

    hit: Hit
    slots: list[int]
    """The checkpoint's own slot, if the state is handed over instead of copied."""
    pages: list[int]


class Admission:
    """Starts waiting sequences in order, as long as the token budget and memory allow."""

    def __init__(
        self,
        options: DecoderOptions,
        queues: Queues,
        memory: SequenceMemory,
        cache: PrefixCache | None,
        checkpointing: Checkpointing | None,
        preemption: Preemption,
    ) -> None:
        self.queues, self.memory, self.cache = queues, memory, cache
        self.checkpointing, self.preemption = checkpointing, preemption
        self._max_chunk = options.max_chunk

    def admit(self, step: Step, chosen: dict[int, Row], budget: int) -> None:
        """Adds the rows of sequences that start now to `chosen`: at most `budget` tokens."""
        memory, running = self.memory, self.queues.running
        if not self.queues.waiting:
            return
        for sequence in running:
            memory.count(sequence, not sequence.stuck)
        if not memory.batch_slot_free and memory.advancers == len(running):
            return
        for sequence in list(self.queues.waiting):
            if budget == 0:
                break
            if sequence.arrival in step.preempted:
                continue
            hit = self.lookup(sequence)
            row = self._first_row(sequence, hit, budget)
            if row is None:
                continue
            if self._defers(sequence, hit, chosen) or not memory.leaves_room(len(sequence.tokens)):
                break
            start = self._make_room(sequence, hit, step, chosen, budget)
            if start is None:
                if hit.tokens and not chosen:  # all memory is not enough for the hit; without it, it waits for images
                    assert self.cache is not None
                    self.cache.overlook(sequence)
                    continue
                break
            if start.hit is not hit:
                row = self._first_row(sequence, start.hit, budget)
                assert row is not None
            self._enter(sequence, start, step)
            chosen[sequence.arrival] = row
            budget -= row.count

    def row(self, sequence: Sequence, budget: int, cached: int = 0) -> Row | None:
        """The sequence's next tokens, at most `budget`; `None` if its next token is not ready. `cached`: how many of
        its first tokens need not be computed, if it has computed none yet."""
        start = max(sequence.computed, cached)
        align = 1 if self.cache is None else self.cache.placement.grid
        budget = min(budget, self._max_chunk or budget)
        end = chunk_end(start, len(sequence.tokens), budget, sequence.ready_end(start), align)
        return Row(sequence, end - start, start) if end > start else None

    def lookup(self, sequence: Sequence) -> Hit:
        """The cached prefix of a sequence that has computed nothing."""
        # If anything of the prompt is requested, all of its tokens are computed.
        if self.cache is None or sequence.computed or sequence.reads_prompt:
            return MISS
        return self.cache.lookup(sequence)

    def could_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has something to compute. Text before an image does not count if it is cached."""
        done = max(sequence.computed, self.lookup(sequence).tokens)
        return sequence.ready_end(done) > max(done, sequence.barrier - 1)

    def _first_row(self, sequence: Sequence, hit: Hit, budget: int) -> Row | None:
        """The sequence's first row after a hit. `None` while the image at that place is not ready, and, for a sequence
        that was preempted while it waited for an image, until that image is ready."""
        if sequence.ready_end(max(sequence.computed, hit.tokens)) < sequence.barrier:
            return None
        return self.row(sequence, budget, hit.tokens)

    def _defers(self, sequence: Sequence, hit: Hit, chosen: dict[int, Row]) -> bool:
        """Whether a row of this step leaves a state that the sequence can continue from in the next step. A sequence
        waits for that only once."""
        if self.checkpointing is None or sequence.deferred or sequence.computed:
            return False
        sequence.deferred = self.checkpointing.leaves(sequence, hit, chosen.values())
        return sequence.deferred

    def _make_room(self, sequence: Sequence, hit: Hit, step: Step, chosen: dict[int, Row], budget: int) -> Start | None:
        """Finds a batch slot, state slots and pages for a sequence, to start from `hit` or else from its beginning;
        `None` if there is no memory. Only sequences that wait for images are preempted for it."""
        stuck: list[Sequence] | None = None
        while True:
            if self.memory.batch_slot_free:
                if hit.tokens and (start := self._take_hit(sequence, hit, step)) is not None:
                    return start
                whole = self.memory.pages_for(len(sequence.tokens))
                ready = not hit.tokens or self._first_row(sequence, MISS, budget) is not None
                if ready and self.memory.reclaim(self.memory.slots_per_seq, whole):
                    return Start(hit if not hit.tokens else MISS, [], [])
            if stuck is None:
                stuck = sorted((s for s in self.queues.running if s.stuck), key=lambda s: s.order)
            if not stuck:
                return None
            self.preemption.preempt(stuck.pop(), step, chosen)

    def _take_hit(self, sequence: Sequence, hit: Hit, step: Step) -> Start | None:
        """Takes memory for a sequence that starts from `hit`: the state is copied or, if memory is short, handed over
        by the cache. `None`, with nothing changed, if neither fits."""
        memory, pool = self.memory, self.memory.pool
        fresh = memory.pages_for(len(sequence.tokens)) - len(hit.pages)
        pool.retain_pages(hit.pages)
        pool.retain_slot(hit.slot)
        pool.retain_pages(hit.tail_pages)
        if memory.reclaim(memory.slots_per_seq, fresh):
            step.held_slots += [hit.slot] if hit.slot >= 0 else []
            step.held_pages += hit.tail_pages
            return Start(hit, [], list(hit.pages))
        pool.release_slot(hit.slot)
        pool.release_pages(hit.tail_pages)
        start = self._adopt(sequence, hit, step)
        if start is None:
            pool.release_pages(hit.pages)
        return start

    def _adopt(self, sequence: Sequence, hit: Hit, step: Step) -> Start | None:
        """Hands the hit's checkpoint over to the sequence, unless the checkpoint is being copied from. The hit's pages
        must have been retained."""
        memory, pool, checkpoint = self.memory, self.memory.pool, hit.checkpoint
        if checkpoint is None or checkpoint.slot < 0 or pool.slot_owners(checkpoint.slot) > 1:
            return None
        own = [page for page in hit.tail_pages if pool.page_owners(page) == 1]
        fresh = memory.pages_for(len(sequence.tokens)) - len(hit.pages) - len(own)
        pool.retain_slot(checkpoint.slot)
        pool.retain_pages(hit.tail_pages)
        done = memory.reclaim(memory.slots_per_seq - 1, fresh)
        pool.release_slot(checkpoint.slot)
        pool.release_pages(hit.tail_pages)
        if not done:
            return None
        assert self.cache is not None
        self.cache.hand_over(checkpoint)
        if not own:
            step.held_pages += hit.tail_pages
        return Start(hit, [checkpoint.slot], [*hit.pages, *own])

    def _enter(self, sequence: Sequence, start: Start, step: Step) -> None:
        """Starts the sequence with its cached prefix, and takes free memory for the rest."""
        hit, first = start.hit, sequence.held.admission < 0
        fresh = self.memory.admit(sequence, start.slots, start.pages)
        if hit.checkpoint is not None:
            if not start.slots and sequence.slot >= 0:
                step.slot_copies.append((hit.slot, sequence.slot))
            if hit.tail in step.held_pages:
                step.page_copies.append((hit.tail, fresh[0]))
        sequence.computed = max(sequence.computed, hit.tokens)
        if first:
            sequence.scheduled = time.monotonic()
        if self.checkpointing is not None and sequence.status is Status.WAITING:
            self.checkpointing.start(sequence, hit)
            if first:
                sequence.cached_tokens = min(hit.tokens, sequence.prompt_len)
        step.new_pages += fresh
        if sequence.status is Status.SWAPPED:
            step.loads.append(sequence)
        self.queues.start(sequence)
