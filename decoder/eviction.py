"""The order in which the prefix cache evicts checkpoints: GreedyDual with frequency.

A checkpoint's worth is the number of tokens that it saves over the next shorter one, times its number of uses, divided
by its bytes, plus the worth of the last checkpoint that had been evicted when it was last used. The checkpoint of least
worth is evicted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from decoder.cached import Checkpoint


class EvictionOrder:
    """The checkpoints in the cache, ordered by worth."""

    def __init__(self, page: int, *, page_bytes: int, slot_bytes: int) -> None:
        """`page`: tokens of a page."""
        self._page, self._page_bytes, self._slot_bytes = page, page_bytes, slot_bytes
        self._live: dict[int, Checkpoint] = {}
        self._heap: list[tuple[float, int, Checkpoint]] = []
        """(worth, ticket, checkpoint); entries whose ticket is out of date are skipped."""
        self._tickets = 0
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._live.values())

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return self._live.get(checkpoint.ticket) is checkpoint

    def worth(self, gain: int, uses: int = 1) -> float:
        """Worth of a checkpoint that saves `gain` tokens and has been used `uses` times, the last time now."""
        size = self._slot_bytes + -(-gain // self._page) * self._page_bytes
        return self._clock + uses * gain * (self._slot_bytes + self._page_bytes) / size

    def touch(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint, or renews the worth of one that is used again."""
        self._live.pop(checkpoint.ticket, None)
        self._tickets += 1
        checkpoint.ticket, checkpoint.worth = self._tickets, self.worth(checkpoint.gain, checkpoint.uses)
        self._live[checkpoint.ticket] = checkpoint
        heapq.heappush(self._heap, (checkpoint.worth, checkpoint.ticket, checkpoint))
        if len(self._heap) > 64 + 4 * len(self._live):
            self._heap = [(c.worth, c.ticket, c) for c in self._live.values()]
            heapq.heapify(self._heap)

    def remove(self, checkpoint: Checkpoint) -> None:
        del self._live[checkpoint.ticket]

    def least(self, below: float | None, busy: Callable[[Checkpoint], bool]) -> Checkpoint | None:
        """The checkpoint of least worth that is not busy, to be evicted; None if there is none, or none with less worth
        than `below`."""
        passed, found = [], None
        while self._heap and found is None:
            worth, ticket, checkpoint = self._heap[0]
            if ticket in self._live and below is not None and worth >= below:
                break
            entry = heapq.heappop(self._heap)
            if ticket not in self._live:
                continue
            if busy(checkpoint):
                passed.append(entry)
                continue
            self._clock = max(self._clock, worth)
            found = checkpoint
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def check_integrity(self) -> None:
        """`AssertionError` unless each checkpoint has an entry in the heap."""
        assert {ticket for _, ticket, _ in self._heap} >= set(self._live), "a checkpoint that can never be evicted"
