"""Memory of sequences: batch slots, state slots and pages of the arena, and space in host memory. The only writer of
`Holding`. If a sequence needs memory, cached memory is evicted for it."""

from __future__ import annotations

from decoder.blocks import Claims, SuperblockPool
from decoder.config import DecoderOptions
from decoder.host_space import HostSpace
from decoder.prefix_cache import PrefixCache
from decoder.sequence import Holding, Sequence, Status
from decoder.step import Save


class SequenceMemory:
    """Allocates and frees the memory of sequences. Other modules decide which sequence gets memory."""

    def __init__(
        self,
        options: DecoderOptions,
        pool: SuperblockPool,
        cache: PrefixCache | None,
        *,
        page_bytes: int,
        slot_bytes: int,
        ring_bytes: int,
    ) -> None:
        """`page_bytes`, `slot_bytes`, `ring_bytes`: bytes of a page, a slot and a ring in host memory."""
        self.page_size, self.slots_per_seq, self.max_seqs = options.page_size, options.slots_per_seq, options.max_seqs
        self.pool, self.cache = pool, cache
        self.page_bytes, self.state_bytes = page_bytes, slot_bytes + ring_bytes
        block_bytes = max(slot_bytes, page_bytes * pool.pages_per_block)
        self.host = HostSpace(pool.num_blocks * block_bytes // 4 if options.host_bytes is None else options.host_bytes)
        self.advancers = 0
        """Number of running sequences that can advance."""
        self._advancing = Claims(pool.pages_per_block)
        """The memory of these sequences."""
        self._admissions = 0
        self._batch_slots = list(range(options.max_seqs - 1, -1, -1))

    @property
    def batch_slot_free(self) -> bool:
        return bool(self._batch_slots)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size) if self.pool.pages_per_block else 0

    def reclaim(self, slots: int, pages: int) -> bool:
        """Evicts until `slots` and `pages` fit; False, with nothing evicted, if even an empty cache would not be
        enough."""
        if self.pool.fits(slots, pages):
            return True
        if self.cache is None or not self.pool.fits_beside(slots, pages, self.pool.needed):
            return False
        while not self.pool.fits(slots, pages):
            if not self.cache.evict():
                return False
        return True

    def leaves_room(self, tokens: int) -> bool:
        """Whether there is memory for one more sequence of `tokens` tokens, and a page for each running one to grow
        into. Otherwise it would be preempted by them, or preempt one of them, as soon as it has started. Cached memory
        counts as free, and so does that of sequences that wait for images."""
        if not self.advancers:
            return True
        pages = self.pages_for(tokens) + (self.advancers if self.pool.pages_per_block else 0)
        return self.pool.fits_beside(self.slots_per_seq, pages, self._advancing)

    # -- a sequence's memory -------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, slots: list[int], pages: list[int]) -> list[int]:
        """Gives a sequence a batch slot and the memory for all its tokens: `slots` and `pages`, of which it has
        references already, and the rest from free memory, whose pages are returned. A copy of the sequence in host
        memory is no longer counted."""
        slots = [*slots, *self._take_slots(self.slots_per_seq - len(slots))]
        fresh = self.pool.take_pages(self.pages_for(len(sequence.tokens)) - len(pages))
        assert fresh is not None
        self._hold(sequence, slots, [*pages, *fresh])
        if sequence.status is Status.SWAPPED:
            self.host.release(sequence.request_id)
        return fresh

    def share(self, leader: Sequence, follower: Sequence, tokens: int) -> list[tuple[int, int]] | None:
        """Gives a further sample the memory to continue after the leader's first `tokens` tokens; whole pages are
        shared. Returns (from, to) of a partial page, which has to be copied, if there is one; `None`, with nothing
        changed, if there is no memory."""
        whole, part = divmod(tokens, self.page_size) if self.pool.pages_per_block else (0, 0)
        if not self._batch_slots or not self.reclaim(self.slots_per_seq, int(part > 0) + 1):
            return None
        slots, shared = self._take_slots(self.slots_per_seq), leader.held.pages[:whole]
        own = self.pool.take_pages(int(part > 0))
        assert own is not None
        self.pool.retain_pages(shared)
        self._hold(follower, slots, [*shared, *own])
        return [(leader.held.pages[whole], page) for page in own]

    def _take_slots(self, count: int) -> list[int]:
        slots = [self.pool.take_slot() for _ in range(count)]
        assert None not in slots
        return [slot for slot in slots if slot is not None]

    def _hold(self, sequence: Sequence, slots: list[int], pages: list[int]) -> None:
        replayed = sequence.held.replayed  # restored from host memory with the state
        sequence.held = Holding(self._batch_slots.pop(), self._admissions, slots, replayed=replayed, pages=pages)
        self._admissions += 1
        self.count(sequence, True)

    def covers(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence has the pages for its first `tokens` tokens."""
        return not self.pool.pages_per_block or tokens <= len(sequence.held.pages) * self.page_size

    def grow(self, sequence: Sequence, tokens: int) -> list[int] | None:
        """Takes the pages that the sequence lacks for its first `tokens` tokens, and returns them; `None`, with nothing
        changed, if there is no memory."""
        held = sequence.held
        needed = max(0, self.pages_for(tokens) - len(held.pages))
        pages = self.pool.take_pages(needed)
        if pages is None and self.reclaim(0, needed):
            pages = self.pool.take_pages(needed)
        if pages is not None:
            held.pages += pages
            if held.counted:
                self._advancing.add(pages=pages)
        return pages

    def cede_slot(self, sequence: Sequence) -> int:
        """Removes the slot of the current state from a sequence that is about to end, and returns it; its reference
        passes to the caller."""
        held, slot = sequence.held, sequence.slot
        held.slots.remove(slot)
        if held.counted:
            self._advancing.remove(slots=[slot])
        held.accepted = 1
        return slot

    def release(self, sequence: Sequence) -> None:
        """Frees everything that a running sequence holds."""
        self.count(sequence, False)
        held = sequence.held
        for slot in held.slots:
            self.pool.release_slot(slot)
        self.pool.release_pages(held.pages)
        self._batch_slots.append(held.batch_slot)
        sequence.held = Holding(admission=held.admission, replayed=held.replayed)

    def count(self, sequence: Sequence, advances: bool) -> None:
        """Counts the memory of a running sequence as that of a sequence that can advance, or no longer does."""
        held = sequence.held
        if advances == held.counted:
            return
        change = self._advancing.add if advances else self._advancing.remove
        change(held.slots, held.pages)
        self.advancers += 1 if advances else -1
        held.counted = advances

    # -- where its state is --------------------------------------------------------------------------------------------

    def accept(self, sequence: Sequence, tokens: int) -> None:
        """Selects the state after the first `tokens` tokens of a verified step as the current one."""
        sequence.held.accepted = tokens

    def replay(self, sequence: Sequence, inputs: int) -> None:
        """Sets how many inputs in its ring come after the state in its slot."""
        sequence.held.replayed = inputs

    # -- host memory ---------------------------------------------------------------------------------------------------

    def swappable(self, sequence: Sequence) -> bool:
        """Whether the sequence has computed anything, and there is space for it in host memory."""
        need = self.state_bytes + len(sequence.held.pages) * self.page_bytes
        return sequence.computed > 0 and self.host.fits(need)

    def to_host(self, sequence: Sequence) -> Save:
        """Counts the computed state and pages of a running sequence as held in host memory, and returns what has to be
        copied there."""
        held = sequence.held
        used = held.pages[: self.pages_for(sequence.computed)]
        self.host.hold(sequence.request_id, self.state_bytes + len(used) * self.page_bytes)
        return Save(sequence, sequence.slot, used, held.batch_slot)

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """`AssertionError` unless batch slots, state slots, pages and host memory add up."""
        slots = [slot for s in running for slot in s.held.slots]
        pages = [page for s in running for page in s.held.pages]
        if self.cache is not None:
            self.cache.check_integrity()
            self.pool.check_integrity(slots, pages, self.cache.slots, self.cache.pages)
        else:
            self.pool.check_integrity(slots, pages)
        batch_slots = self._batch_slots + [s.held.batch_slot for s in running]
        assert sorted(batch_slots) == list(range(self.max_seqs)), "a batch slot is lost or taken twice"
        self.host.check_integrity({s.request_id for s in waiting if s.status is Status.SWAPPED})
        assert all(len(s.held.slots) == self.slots_per_seq for s in running), "a state slot is not reserved"
        assert all(not s.held.slots and not s.held.pages and not s.held.counted for s in waiting)
        counted = Claims(self.pool.pages_per_block)
        for sequence in running:
            if sequence.held.counted:
                counted.add(sequence.held.slots, sequence.held.pages)
        assert counted == self._advancing, f"memory of those that advance counted {self._advancing}, held {counted}"
        assert self.advancers == sum(s.held.counted for s in running)
