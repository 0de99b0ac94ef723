"""Chooses the requests that run in the next step, and the number of tokens of each. Pure policy: no tensors.

The parts are in separate modules: order (`decoder.queues`), memory of sequences (`decoder.memory`), admission
(`decoder.admission`), preemption (`decoder.preemption`), the states to keep (`decoder.checkpointing`), and samples of
one prompt (`decoder.forks`).

Bound on waiting. Let S be the requests that run while a request waits, those of smaller rank, and the request itself.
Once all its images are ready, the request ends within `rounds x (W + R)` steps, where W is the number of prompt and
output tokens of S, R the number of tokens that requests of S compute again after preemptions, plus one for each
preemption, and `rounds` is `max_seqs / max_batched_tokens`, rounded up. The reason: of the requests that can advance,
the first in order gets a row every `rounds` steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from decoder.admission import Admission
from decoder.blocks import SuperblockPool
from decoder.checkpointing import Checkpointing
from decoder.checkpoints import most_checkpoints
from decoder.config import DecoderOptions
from decoder.forks import Forks
from decoder.memory import SequenceMemory
from decoder.preemption import Preemption
from decoder.prefix_cache import PrefixCache
from decoder.queues import Queues
from decoder.sequence import Sequence, Status
from decoder.step import Row, Step


class Scheduler:
    """Schedules steps, and commits their results."""

    def __init__(
        self,
        options: DecoderOptions,
        pool: SuperblockPool,
        *,
        page_bytes: int = 0,
        slot_bytes: int = 0,
        ring_bytes: int = 0,
        cache: PrefixCache | None = None,
    ) -> None:
        """`page_bytes`, `slot_bytes`, `ring_bytes`: bytes of a page, a slot and a ring in host memory, limited by
        `host_bytes`. `cache`: holds memory that no sequence needs, and evicts if a sequence needs memory.
        """
        self.options, self.pool, self.cache = options, pool, cache
        self.queues = Queues(options)
        self.running, self.waiting = self.queues.running, self.queues.waiting
        self.memory = SequenceMemory(
            options, pool, cache, page_bytes=page_bytes, slot_bytes=slot_bytes, ring_bytes=ring_bytes
        )
        self.checkpointing: Checkpointing | None = None
        if cache is not None:
            most = most_checkpoints(options.checkpoint_bytes, cache.slot_bytes)
            self.checkpointing = Checkpointing(cache, self.memory, most)
        self.preemption = Preemption(self.queues, self.memory)
        self.admission = Admission(options, self.queues, self.memory, cache, self.checkpointing, self.preemption)
        self.forks = Forks(self.queues, self.memory, self.checkpointing)

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self, preempt: Iterable[Sequence] = ()) -> Step:
        """The next step, for whose rows memory is taken; it has no rows if nothing can advance. `preempt`: running
        sequences to preempt first.
        """
        self.queues.step_number += 1
        step, chosen = Step(failed=self.queues.failed()), dict[int, Row]()
        for sequence, _ in step.failed:
            self.finish(sequence)
        for sequence in preempt:
            if sequence.status is Status.RUNNING:
                self.preemption.preempt(sequence, step, chosen)
        budget = self._continue_running(step, chosen)
        self.admission.admit(step, chosen, budget)
        step.rows = sorted(chosen.values(), key=_batch_order)
        if self.checkpointing is not None:
            self.checkpointing.place(step)
        return step

    def _continue_running(self, step: Step, chosen: dict[int, Row]) -> int:
        """Chooses rows of running sequences. Returns the remaining token budget."""
        budget = self.options.max_batched_tokens
        spare = max(0, budget - len(self.running))
        for sequence in self.queues.running_order(budget):
            if budget == 0:
                break
            if sequence.status is not Status.RUNNING or (sequence.unread and sequence.full):
                continue
            if self._goes_on(sequence):
                chosen[sequence.arrival] = Row(sequence, 1, sequence.computed)
                budget -= 1
                continue
            row = self._drafted(sequence, min(spare, budget - 1)) or self.admission.row(sequence, budget)
            if row is not None and self.preemption.grow(sequence, row.end, step, chosen):
                chosen[sequence.arrival] = row
                budget -= row.count
                spare -= row.drafts
        return budget

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether its next row is a single token that it has all memory for, as for most rows."""
        if not sequence.decoding or sequence.draft.limit or sequence.next_span < len(sequence.request.spans):
            return False
        return self.memory.covers(sequence, len(sequence.tokens))

    def _drafted(self, sequence: Sequence, spare: int) -> Row | None:
        """The row of a sequence with at most `spare` drafts; `None` if it gets no draft. No sequence is preempted for a
        draft, and no draft is made for a token beyond the sequence's limit. A row that ends the prompt has no drafts:
        further samples start from the state after it, and hidden states of prompts end with it.
        """
        drafts = min(sequence.draft.limit, spare, sequence.limit - sequence.output_len - 1)
        if drafts <= 0 or not sequence.decoding or sequence.computed < sequence.prompt_len:
            return None
        row = Row(sequence, 1 + drafts, sequence.computed, drafts)
        missing = self.memory.pages_for(row.end) - len(sequence.held.pages)
        return row if self.memory.reclaim(0, missing) else None

    def commit(self, step: Step) -> None:
        """To be called when the rows of `step` have been computed, and the drawn tokens are in their sequences (or, for
        a step in flight, are about to be added as unread)."""
        for row in step.rows:
            sequence = row.sequence
            sequence.computed = row.end if not row.drafts else min(row.end, len(sequence.tokens) - 1)
            sequence.last_step = self.queues.step_number
            if self.checkpointing is not None:
                if step.checkpoints:
                    self.checkpointing.register(sequence, step.checkpoints.pop(sequence.arrival, ()))
                if row.drafts:
                    self.checkpointing.rewind(sequence)
        for lost in step.checkpoints.values():
            assert self.checkpointing is not None
            self.checkpointing.lose(lost)
        for slot in step.held_slots:
            self.pool.release_slot(slot)
        self.pool.release_pages(step.held_pages)

    # -- requests ------------------------------------------------------------------------------------------------------

    def keep(self, sequence: Sequence) -> tuple[int, int] | None:
        """See `Checkpointing.keep`; `None` without a cache."""
        return None if self.checkpointing is None else self.checkpointing.keep(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence and frees all it holds. The caller must ensure that no step is using it."""
        if sequence.status is Status.RUNNING:
            self.memory.release(sequence)
        else:
            self.memory.host.forget(sequence.request_id)
        self.queues.remove(sequence)

    # -- queries, statistics, checks -----------------------------------------------------------------------------------

    @property
    def needs_ids(self) -> bool:
        """Whether the next step could keep a state after a token that has been drawn but not read, whose id its key
        needs."""
        return any(s.unread and s.computed + 1 >= s.cursor.next_mark for s in self.running)

    @property
    def runnable(self) -> bool:
        """Whether `schedule` might return rows or failures. It may be True even if there is no memory to start a
        sequence."""
        return any(s.ready_end() > s.computed or (s.request.spans and s.source_error()) for s in self.running) or any(
            self.admission.could_start(s) or (s.request.spans and s.source_error()) for s in self.waiting
        )

    def ahead(self, sequence: Sequence) -> list[Sequence]:
        """A waiting sequence, and all sequences before it: their prompts are computed before its first token."""
        others = (*self.running, *self.waiting)
        return [sequence, *(other for other in others if other is not sequence and other.order < sequence.order)]

    def missing(self, sequence: Sequence, *, cached: bool = True) -> int:
        """Number of prompt tokens of a sequence that have to be computed. `cached`: without the cached ones, which
        takes a lookup."""
        done = max(sequence.computed, self.admission.lookup(sequence).tokens if cached else 0)
        return max(0, sequence.prompt_len - done)

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        return {
            "preemptions": self.preemption.preemptions,
            "recomputes": self.preemption.recomputes,
            "forks": self.forks.forks,
            "fork_misses": self.forks.misses,
            "running": len(self.running),
            "waiting": sum(1 for _ in self.queues) - len(self.running),
            "used_slots": sum(slot >= 0 for sequence in self.running for slot in sequence.held.slots),
            "used_pages": len({page for sequence in self.running for page in sequence.held.pages}),
            "host_bytes": self.memory.host.used,
        }

    def check_integrity(self) -> None:
        """`AssertionError` unless everything that is held belongs to a live sequence."""
        self.memory.check_integrity(self.running, self.waiting)
        if self.checkpointing is not None:
            self.checkpointing.check_integrity()


def _batch_order(row: Row) -> tuple[int, ...]:
    """Sort key of rows: by kind; rows that update a state by their slots, so that neighbours in the batch are
    neighbours in memory.
    """
    if row.kind < 2:
        return (row.verified, row.kind, row.sequence.slot)
    return (row.kind, *row.sequence.order)
