"""Which sequence is preempted when memory is short, and how.

The least urgent running sequence is preempted (its state goes to host memory, or is computed again later), so the most
urgent one can always grow to its end. Sequences that wait for an image are preempted before all others. A sequence
whose image rows have been released cannot be computed again; if nothing else helps, it is moved to host memory even
above the limit of `host_bytes`.
"""

from __future__ import annotations

from decoder.memory import SequenceMemory
from decoder.queues import Queues
from decoder.sequence import Sequence, Status
from decoder.step import Row, Step


class Preemption:
    """Takes memory from running sequences."""

    def __init__(self, queues: Queues, memory: SequenceMemory) -> None:
        self.queues, self.memory = queues, memory
        self.preemptions = 0
        self.recomputes = 0
        """Preempted sequences whose state was not saved."""

    def grow(self, sequence: Sequence, tokens: int, step: Step, chosen: dict[int, Row]) -> bool:
        """Takes pages for the sequence's first `tokens` tokens, if necessary by preempting less urgent sequences.
        Returns False if the sequence has to wait or was preempted itself."""
        while True:
            pages = self.memory.grow(sequence, tokens)
            if pages is not None:
                step.new_pages += pages
                return True
            victim = self.victim(sequence)
            if victim is None:
                return False
            self.preempt(victim, step, chosen)
            if victim is sequence:
                return False

    def victim(self, sequence: Sequence) -> Sequence | None:
        """The sequence to preempt so that `sequence` can grow: one that waits for an image, else the least urgent one,
        possibly `sequence` itself. `None` if no other sequence runs."""
        others = [s for s in self.queues.running if s is not sequence]
        for stuck in (True, False):
            candidates = [s for s in others if not stuck or s.stuck]
            for candidate in sorted(candidates, key=lambda s: s.order, reverse=True):
                if not stuck and candidate.order < sequence.order:
                    break
                if self._can_leave(candidate):
                    return candidate
        if not others:
            return None
        first = not any(other.order < sequence.order and not other.stuck for other in others)
        if self._can_leave(sequence) and not first:
            return sequence
        return max(self.queues.running, key=lambda s: s.order)  # goes to host memory above its limit

    def _can_leave(self, sequence: Sequence) -> bool:
        """Whether the sequence can be preempted: by swapping within the limit, or by computing its tokens again."""
        return self.memory.swappable(sequence) or sequence.next_span == 0

    def preempt(self, sequence: Sequence, step: Step, chosen: dict[int, Row]) -> None:
        """Returns the sequence to the queue, frees its memory and removes its row from `chosen`. Its exact state is
        saved if there is space, or if it could not be computed again."""
        self.preemptions += 1
        step.preempted.add(sequence.arrival)
        chosen.pop(sequence.arrival, None)
        fresh = set(step.new_pages) & set(sequence.held.pages)
        step.new_pages = [page for page in step.new_pages if page not in fresh]
        swapped = self.memory.swappable(sequence) or sequence.next_span > 0
        if swapped:
            step.saves.append(self.memory.to_host(sequence))
        self.memory.release(sequence)
        self.queues.requeue(sequence, Status.SWAPPED if swapped else Status.WAITING)
        if not swapped:
            self.recomputes += 1
            sequence.computed = 0
            self.memory.replay(sequence, 0)
