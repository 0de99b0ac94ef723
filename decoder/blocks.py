"""Superblocks of the arena: which are free, and who holds references to the others. Pure Python, no tensors.

A superblock is free, or one state slot, or a run of `pages_per_block` KV pages. A slot has the number of its
superblock; page `p` is in superblock `p // pages_per_block`. Slots are taken from the low end and superblocks for pages
from the high end, so that both stay dense.

    free superblock -> take_slot -> slot     -> (retain)* release -> free superblock
    free superblock -> take_pages -> pages   -> (retain)* release -> free superblock when its last page is free
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Claims:
    """References of some owners, and the superblocks that they occupy. Counts are updated when references change, so
    that reading them takes constant time."""

    pages_per_block: int
    slots: dict[int, int] = field(default_factory=dict)
    """Slot -> references."""
    pages: dict[int, int] = field(default_factory=dict)
    """Page -> references."""
    blocks: dict[int, int] = field(default_factory=dict)
    """Superblock -> number of its pages that have references."""

    @property
    def used_blocks(self) -> int:
        return len(self.slots) + len(self.blocks)

    @property
    def loose_pages(self) -> int:
        """Pages without references in superblocks that have pages with references."""
        return len(self.blocks) * self.pages_per_block - len(self.pages)

    def add(self, slots: Iterable[int] = (), pages: Iterable[int] = ()) -> None:
        """Adds a reference to each; slots below 0 are skipped."""
        for slot in slots:
            if slot >= 0:
                self.slots[slot] = self.slots.get(slot, 0) + 1
        for page in pages:
            owners = self.pages.get(page, 0)
            self.pages[page] = owners + 1
            if not owners:
                block = page // self.pages_per_block
                self.blocks[block] = self.blocks.get(block, 0) + 1

    def remove(self, slots: Iterable[int] = (), pages: Iterable[int] = ()) -> tuple[list[int], list[int]]:
        """Removes a reference from each. Returns the slots and the pages that have none left."""
        freed_slots, freed_pages = [], []
        for slot in slots:
            if slot >= 0:
                self.slots[slot] -= 1
                if not self.slots[slot]:
                    del self.slots[slot]
                    freed_slots.append(slot)
        for page in pages:
            self.pages[page] -= 1
            if not self.pages[page]:
                del self.pages[page]
                freed_pages.append(page)
                block = page // self.pages_per_block
                self.blocks[block] -= 1
                if not self.blocks[block]:
                    del self.blocks[block]
        return freed_slots, freed_pages


class PartlyFree:
    """Free pages of superblocks that also have used pages."""

    def __init__(self) -> None:
        self.pages: dict[int, list[int]] = {}
        """Superblock -> its free pages, ascending; at least one."""
        self._fullness: list[tuple[int, int]] = []
        """Heap of (free pages, -superblock); entries that are out of date are skipped."""

    def changed(self, block: int) -> None:
        """The superblock has more or fewer free pages than before."""
        if not self.pages[block]:
            del self.pages[block]
            return
        heapq.heappush(self._fullness, (len(self.pages[block]), -block))
        if len(self._fullness) > 64 + 4 * len(self.pages):
            self._fullness = [(len(pages), -block) for block, pages in self.pages.items()]
            heapq.heapify(self._fullness)

    def fullest(self) -> int | None:
        """The superblock with the fewest free pages: filling it up lets emptier ones become free."""
        while self._fullness:
            free, block = self._fullness[0]
            if len(self.pages.get(-block, ())) == free:
                return -block
            heapq.heappop(self._fullness)
        return None


class SuperblockPool:
    """Counted references to slots and pages that share one set of superblocks.

    A reference is either needed or ceded. Memory with only ceded references, those of the prefix cache, can be
    reclaimed at any time.
    """

    def __init__(self, num_blocks: int, pages_per_block: int, has_slots: bool = True) -> None:
        """`pages_per_block` 0: the model has no pages. `has_slots` False: it has no states, and slots cost nothing."""
        self.num_blocks = num_blocks
        self.pages_per_block = pages_per_block
        self.has_slots = has_slots
        self._free = list(range(num_blocks))
        self._held = Claims(pages_per_block)
        self.needed = Claims(pages_per_block)
        """All references that have not been ceded."""
        self._partly_free = PartlyFree()

    # -- counts --------------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def loose_pages(self) -> int:
        """Free pages in superblocks that also have used ones: memory that only pages can use."""
        return self._held.loose_pages

    def fits(self, slots: int, pages: int) -> bool:
        """Whether `slots` and `pages` can be taken now, together."""
        return self.shortage(slots, pages) == 0

    def shortage(self, slots: int, pages: int) -> int:
        """Superblocks that have to be freed before `slots` and `pages` can be taken."""
        return max(0, self._blocks_for(slots, pages, self.loose_pages) - self.free_blocks)

    # -- taking and releasing ------------------------------------------------------------------------------------------

    def take_slot(self, high: bool = False) -> int | None:
        """A slot with one reference, -1 for a model without states, or `None` if memory is short.

        `high`: from the high end, for checkpoints, so that the slots of running sequences are adjacent.
        """
        if not self.has_slots:
            return -1
        if not self._free:
            return None
        slot = self._free.pop() if high else self._free.pop(0)
        self._held.add(slots=(slot,))
        self.needed.add(slots=(slot,))
        return slot

    def take_pages(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or `None` and nothing taken if memory is short."""
        if self.pages_per_block == 0 or count == 0:
            return []
        if not self.fits(0, count):
            return None
        taken: list[int] = []
        while len(taken) < count:
            block = self._partly_free.fullest()
            if block is None:
                block = self._free.pop()
                first = block * self.pages_per_block
                self._partly_free.pages[block] = list(range(first, first + self.pages_per_block))
            pages = self._partly_free.pages[block]
            wanted = count - len(taken)
            taken += pages[:wanted]
            del pages[:wanted]
            self._partly_free.changed(block)
        self._held.add(pages=taken)
        self.needed.add(pages=taken)
        return taken

    def slot_owners(self, slot: int) -> int:
        """References to a slot; 0 for a free one."""
        return self._held.slots.get(slot, 0)

    def page_owners(self, page: int) -> int:
        """References to a page; 0 for a free one."""
        return self._held.pages.get(page, 0)

    def fits_beside(self, slots: int, pages: int, claims: Claims) -> bool:
        """Whether `slots` and `pages` could be taken if only the references in `claims` were held."""
        return self._blocks_for(slots, pages, claims.loose_pages) <= self.num_blocks - claims.used_blocks

    def _blocks_for(self, slots: int, pages: int, loose_pages: int) -> int:
        """Free superblocks that `slots` and `pages` take, if `loose_pages` are taken first."""
        blocks = slots if self.has_slots else 0
        if self.pages_per_block:
            blocks += -(-max(0, pages - loose_pages) // self.pages_per_block)
        return blocks

    def retain_slot(self, slot: int) -> None:
        """Adds a reference."""
        assert slot < 0 or slot in self._held.slots, f"slot {slot} has no references"
        self._held.add(slots=(slot,))
        self.needed.add(slots=(slot,))

    def retain_pages(self, pages: Iterable[int], *, ceded: bool = False) -> None:
        """Adds a reference to each, a ceded one if `ceded`."""
        pages, held = list(pages), self._held.pages
        assert all(page in held for page in pages), f"each of the pages {pages} must have references"
        self._held.add(pages=pages)
        if not ceded:
            self.needed.add(pages=pages)

    def release_slot(self, slot: int, *, ceded: bool = False) -> None:
        """Removes a reference, a ceded one if `ceded`; removing the last one frees the superblock."""
        if not ceded:
            self.needed.remove(slots=(slot,))
        for freed in self._held.remove(slots=(slot,))[0]:
            insort(self._free, freed)

    def release_pages(self, pages: Iterable[int], *, ceded: bool = False) -> None:
        """Removes a reference from each, a ceded one if `ceded`; a superblock without used pages becomes free."""
        pages = list(pages)
        if not ceded:
            self.needed.remove(pages=pages)
        changed = set()
        for page in self._held.remove(pages=pages)[1]:
            block = page // self.pages_per_block
            changed.add(block)
            insort(self._partly_free.pages.setdefault(block, []), page)
        for block in changed:
            if len(self._partly_free.pages[block]) == self.pages_per_block:
                del self._partly_free.pages[block]
                insort(self._free, block)
            else:
                self._partly_free.changed(block)

    def cede(self, slots: Iterable[int] = (), pages: Iterable[int] = ()) -> None:
        """Turns one needed reference to each into a ceded one."""
        self.needed.remove(slots, pages)

    def claim(self, slots: Iterable[int] = (), pages: Iterable[int] = ()) -> None:
        """Turns one ceded reference to each into a needed one."""
        self.needed.add(slots, pages)

    def check_integrity(
        self, slots: Iterable[int] = (), pages: Iterable[int] = (), ceded_slots: Iterable[int] = (),
        ceded_pages: Iterable[int] = (),
    ) -> None:  # fmt: skip
        """`AssertionError` unless free + slots + page blocks = all, and the given owners match the counts.

        `slots`, `pages`: one entry for each needed reference; `ceded_slots`, `ceded_pages`: for each ceded one.
        """
        holding = {page // self.pages_per_block for page in self._held.pages}
        partly = self._partly_free.pages
        kinds = [set(self._free), set(self._held.slots), holding | set(partly)]
        assert sum(map(len, kinds)) == self.num_blocks == len(set().union(*kinds)), (
            "a superblock is lost or owned twice"
        )
        assert self._free == sorted(set(self._free))
        for block in holding | set(partly):
            used = sum(1 for page in self._held.pages if page // self.pages_per_block == block)
            loose = partly.get(block, [])
            assert used + len(loose) == self.pages_per_block, f"superblock {block} has lost pages"
            assert used > 0, f"superblock {block} holds only free pages"
            assert not set(loose) & set(self._held.pages)
        needed, held = Claims(self.pages_per_block), Claims(self.pages_per_block)
        slots, pages = list(slots), list(pages)
        needed.add(slots, pages)
        held.add([*slots, *ceded_slots], [*pages, *ceded_pages])
        assert held == self._held, f"references counted {self._held}, held {held}"
        assert needed == self.needed, f"needed references counted {self.needed}, held {needed}"
