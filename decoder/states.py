"""Moves the content of the arena before a step runs, and commits the step's results after it."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from decoder.arena import Arena, Saved
from decoder.batch import BatchBuilder
from decoder.config import RING
from decoder.model import HybridModel
from decoder.mtp import MtpDrafter
from decoder.scheduler import Scheduler
from decoder.sequence import Sequence
from decoder.step import Row, Step


class States:
    """Executes the moves and copies of a step. Keeps the saved content of preempted sequences."""

    def __init__(
        self,
        arena: Arena,
        model: HybridModel,
        builder: BatchBuilder,
        scheduler: Scheduler,
        drafter: MtpDrafter | None,
        *,
        empties: bool,
        at_once: bool,
    ) -> None:
        """`empties`: whether a step applies the inputs in a ring to the state by itself, in all layers. `at_once`:
        whether tokens are on the host when they are drawn."""
        self.arena, self.model, self.builder = arena, model, builder
        self.scheduler, self.drafter = scheduler, drafter
        self.saved: dict[str, Saved] = {}
        self._empties, self.at_once = empties, at_once
        self._room = 0 if model.native is not None and not empties else RING

    def move(self, step: Step) -> None:
        """Saves content to the host, clears new pages, copies cached content, and loads content from the host."""
        if self.drafter is not None and (
            step.saves or step.preempted or step.page_copies or step.slot_copies or step.loads
        ):
            self.drafter.flush()
        for sequence, slot, pages, batch_slot in step.saves:
            self.saved[sequence.request_id] = self.arena.save(slot, pages, batch_slot, sequence.held.replayed)
        self.arena.clear_pages(step.new_pages)
        for source, target in step.page_copies:
            self.arena.copy_page(source, target)
        for source, target in step.slot_copies:
            self.arena.copy_slot(source, target)
        for sequence in step.loads:
            saved = self.saved.pop(sequence.request_id)
            self.arena.load(sequence.slot, sequence.held.pages, saved, sequence.held.batch_slot)
        if self.drafter is not None:
            self.drafter.pages.moved(step)

    def empty_rings(self, running: Iterable[Sequence]) -> None:
        """Empties the rings of sequences that get no drafts, or whose rings lack space for them, by advancing their
        states. If `empties`, a step empties them itself."""
        full = []
        for sequence in running:
            inputs = sequence.held.replayed
            if inputs and not 0 < sequence.draft.limit < self._room - inputs * (not self._empties):
                full.append(sequence)
        if not full:
            return
        self.advance([(s, s.slot, s.slot, s.held.replayed) for s in full])
        for sequence in full:
            self.scheduler.memory.replay(sequence, 0)
            self.builder.states.accept(sequence)

    def advance(self, jobs: list[tuple[Sequence, int, int, int]]) -> None:
        """Advances states. For each (sequence, slot, target, count), the state in `slot`, advanced by the first `count`
        inputs of the sequence's ring, is written to the slot `target`."""
        for _, slot, target, count in jobs:
            if count == 0 and slot != target:
                self.arena.copy_slot(slot, target)
        moved = [(sequence.held.batch_slot, *rest) for sequence, *rest in jobs if rest[2] and rest[0] >= 0]
        if moved:
            self.model.advance(moved)
        if moved and self.arena.carry is not None:
            for _, slot, target, _ in moved:
                self.arena.carry[target] = self.arena.carry[slot]

    def commit(self, step: Step) -> None:
        """Commits the results of the step: current states, states to keep, states of further samples."""
        first = 0
        carried: list[tuple[int, int]] = []
        moves = self.drafter is not None or step.checkpoints or any(row.verified for row in step.rows)
        for row in step.rows if moves else ():
            kept = self._settle(row, step.checkpoints.get(row.sequence.arrival, ()))
            carried += [(slot, first + position - row.start - 1) for position, slot in kept]
            first += row.count
        if self.drafter is not None:
            self.drafter.settle(carried)
            if step.forks:
                self.drafter.forked(step.forks)
        for fork in step.forks:
            if fork.pages is not None:
                self.arena.copy_page(*fork.pages)
            if fork.slots[0] >= 0:
                self.arena.copy_slot(*fork.slots)
        self.scheduler.commit(step)

    def _settle(self, row: Row, checkpoints: SequenceOf[tuple[int, int]]) -> list[tuple[int, int]]:
        """Finds the states after a row: the current one, and those at `checkpoints` (position, slot) that are kept.
        Returns (position, slot) of all of these."""
        sequence, verified = row.sequence, row.verified
        before = 0 if self._empties else sequence.held.replayed
        end = len(sequence.tokens) - 1 if row.drafts else row.end
        written = row.drafts > 0 and not self.builder.states.replayed
        jobs = []
        for position, target in checkpoints:
            if target < 0 or position > end or (position < row.end and not verified):
                continue
            done = position - row.start
            source = sequence.held.slots[done - 1] if written else sequence.slot
            jobs.append((sequence, source, target, before + done if verified and not written else 0))
        self.advance(jobs)
        if verified:
            if written:
                self.scheduler.memory.accept(sequence, end - row.start)
            else:
                self.scheduler.memory.replay(sequence, before + end - row.start)
            if self.at_once:
                self.builder.states.accept(sequence)
        return [(end, sequence.slot), *(kept for kept in checkpoints if kept[0] <= end)]

    def keep(self, sequence: Sequence) -> None:
        """Passes the state at the end of an answer to the cache."""
        self._flush()
        copy = self.scheduler.keep(sequence)
        if copy is not None:
            self.advance([(sequence, *copy, sequence.held.replayed)])

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence: frees its memory and drops its saved content."""
        self._flush()
        self.scheduler.finish(sequence)
        self.saved.pop(sequence.request_id, None)

    def _flush(self) -> None:
        if self.drafter is not None:
            self.drafter.flush()
