"""Decides which states of sequences are kept in the prefix cache, and when. The only writer of `CacheCursor`."""

from __future__ import annotations

from collections.abc import Iterable

from decoder.cached import Hit
from decoder.memory import SequenceMemory
from decoder.prefix_cache import PrefixCache
from decoder.prefix_keys import key_at, share_keys
from decoder.sequence import CacheCursor, Sequence, Status
from decoder.step import Row, Step


class Checkpointing:
    """Keeps the states at positions that the cache's placement policy chooses."""

    def __init__(self, cache: PrefixCache, memory: SequenceMemory, most: int | None = None) -> None:
        """`most`: largest number of states that may be kept; None: as many as fit the arena."""
        self.cache, self.memory, self.most = cache, memory, most
        self._unwritten = 0
        """State slots that running steps will write."""

    def start(self, sequence: Sequence, hit: Hit) -> None:
        """Sets the positions at which the states of a sequence that starts after `hit` are kept."""
        self.cache.use(sequence, hit)
        placement, request = self.cache.placement, sequence.request
        marks = placement.prompt_marks(
            sequence.prompt_len,
            images=[span.end for span in request.spans if span.complete],
            wanted=request.checkpoint_at,
            junction=hit.matched if hit.matched > hit.tokens else 0,
        )
        following = placement.next_mark(marks, sequence.prompt_len, hit.tokens)
        sequence.cursor = CacheCursor(marks, following, hit.tokens, sequence.cursor.moving)

    def follow(self, leader: Sequence, follower: Sequence) -> None:
        """Sets the cursor of a further sample, which continues after the prompt that its leader has computed."""
        following = self.cache.placement.next_mark((), follower.prompt_len, follower.computed)
        follower.cursor = CacheCursor((), following, leader.cursor.last_mark)
        share_keys(leader, follower)

    def marks(self, row: Row) -> list[int]:
        """Positions in a row whose states are kept."""
        sequence = row.sequence
        if row.end < sequence.cursor.next_mark:
            return []
        between = self.cache.placement.marks_between
        cuts = range(row.start, row.end) if row.drafts else (row.start,)
        ends = [*cuts[1:], row.end]
        places = (between(sequence.cursor.marks, sequence.prompt_len, *cut) for cut in zip(cuts, ends, strict=True))
        return [mark for found in places for mark in found]

    def leaves(self, sequence: Sequence, hit: Hit, rows: Iterable[Row]) -> bool:
        """Whether one of these rows leaves a state, after `hit`, that the sequence could continue from."""
        limit, page = len(sequence.tokens) - 1, self.cache.placement.page
        for row in rows:
            for mark in self.marks(row):
                if hit.tokens < mark <= limit and mark <= len(row.sequence.tokens):
                    if key_at(sequence, mark, page) == key_at(row.sequence, mark, page):
                        return True
        return False

    def place(self, step: Step) -> None:
        """Takes slots for the states of this step's rows that are to be kept, from free memory or that of checkpoints
        of less worth; states without a slot are not kept."""
        for row in step.rows:
            sequence, cursor = row.sequence, row.sequence.cursor
            if row.end < cursor.next_mark:
                continue
            for mark in self.marks(row):
                if mark > len(sequence.tokens) or not self.cache.holds(sequence, mark):
                    if not self._within_budget(mark - cursor.last_mark):
                        continue
                    slot = self.cache.take_slot(mark - cursor.last_mark)
                    if slot is None:
                        continue
                    self._unwritten += 1
                    step.checkpoints.setdefault(sequence.arrival, []).append((mark, slot))
            cursor.next_mark = self.cache.placement.next_mark(cursor.marks, sequence.prompt_len, row.end)

    def _within_budget(self, gain: int) -> bool:
        """Whether one more state may be kept, if necessary by evicting a checkpoint of less worth."""
        while self.most is not None and len(self.cache.order) + self._unwritten >= self.most:
            if not self.cache.evict(self.cache.order.worth(gain)):
                return False
        return True

    def lose(self, kept: Iterable[tuple[int, int]]) -> None:
        """Drops the states (position, slot) of a sequence that has ended."""
        for _, slot in kept:
            self._unwritten -= 1
            self.cache.pool.release_slot(slot)

    def register(self, sequence: Sequence, kept: Iterable[tuple[int, int]]) -> None:
        """Inserts states (position, slot) of a sequence, which have been written, into the cache."""
        cache, cursor = self.cache, sequence.cursor
        for position, slot in kept:
            self._unwritten -= 1
            if position > sequence.computed:  # after a rejected draft
                cache.pool.release_slot(slot)
                continue
            found = cache.insert(sequence, position, slot, max(1, position - cursor.last_mark))
            cursor.last_mark = max(cursor.last_mark, position)
            if cache.placement.mode == "align" and position >= sequence.prompt_len:
                if cursor.moving is not None:
                    cache.drop(cursor.moving)
                cursor.moving = found

    def rewind(self, sequence: Sequence) -> None:
        """Sets the next state to keep to the first one after the computed tokens: drafts may have been rejected."""
        cursor = sequence.cursor
        cursor.next_mark = self.cache.placement.next_mark(cursor.marks, sequence.prompt_len, sequence.computed)

    def keep(self, sequence: Sequence) -> tuple[int, int] | None:
        """Gives the state after all computed tokens of a running sequence to the cache, under `auto` and in models
        without states. Returns (from, to) of the state, which must be copied before anything else runs; if there is no
        memory for a copy, the sequence's own slot passes to the cache. To be called just before the sequence is
        finished."""
        cache, page, end = self.cache, self.cache.placement.page, sequence.computed
        if sequence.status is not Status.RUNNING:
            return None
        if not cache.placement.has_states:
            end = end // page * page
        elif cache.placement.mode != "auto":
            return None
        gain, source = end - sequence.cursor.last_mark, sequence.slot
        if gain < page or cache.holds(sequence, end) or not self._within_budget(gain):
            return None
        slot = cache.take_slot(gain)
        if slot is None:
            slot = self.memory.cede_slot(sequence)
        cache.insert(sequence, end, slot, gain)
        return (source, slot) if slot >= 0 else None

    def check_integrity(self) -> None:
        """`AssertionError` if more checkpoints are kept than allowed, or the count of unwritten states is below 0."""
        assert self.most is None or len(self.cache.order) + self._unwritten <= self.most, (
            "more checkpoints than the budget allows"
        )
        assert self._unwritten >= 0
