"""Who owns which superblock: the arena's book-keeping. Pure Python, no tensors.

A superblock is free, or one state slot, or a run of `pages_per_block` KV pages. A slot's number is its superblock's;
page `p` lies in superblock `p // pages_per_block`. Slots are taken from the low end and page blocks from the high
end, so that both stay dense.

    free superblock -> take_slot -> slot     -> (retain)* release -> free superblock
    free superblock -> take_pages -> pages   -> (retain)* release -> free superblock once its last page is back
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable


class SuperblockPool:
    """Counted references to slots and pages that share one set of superblocks."""

    def __init__(self, num_blocks: int, pages_per_block: int, has_slots: bool = True) -> None:
        """`pages_per_block` 0: the model has no pages. `has_slots` False: it has no states, and slots cost nothing."""
        self.num_blocks = num_blocks
        self.pages_per_block = pages_per_block
        self.has_slots = has_slots
        self._free = list(range(num_blocks))
        self._slots: dict[int, int] = {}
        self._pages: dict[int, int] = {}
        self._partial: dict[int, list[int]] = {}

    # -- what there is -------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_slots(self) -> int:
        return len(self._slots)

    @property
    def used_pages(self) -> int:
        return len(self._pages)

    @property
    def loose_pages(self) -> int:
        """Free pages in superblocks that hold used ones too: memory that only pages can use."""
        return sum(len(pages) for pages in self._partial.values())

    def fits(self, slots: int, pages: int) -> bool:
        """Could `slots` and `pages` be taken now, together?"""
        return self.shortage(slots, pages) == 0

    def shortage(self, slots: int, pages: int) -> int:
        """Superblocks that would have to be freed first."""
        blocks = slots if self.has_slots else 0
        if pages and self.pages_per_block:
            blocks += -(-max(0, pages - self.loose_pages) // self.pages_per_block)
        return max(0, blocks - self.free_blocks)

    # -- taking and giving back ----------------------------------------------------------------------------------------

    def take_slot(self, high: bool = False) -> int | None:
        """A slot with one reference, -1 for a model without states, or `None` when memory is short.

        `high`: from the other end, for states that are only kept: neighbours of a batch are worked on together.
        """
        if not self.has_slots:
            return -1
        if not self._free:
            return None
        slot = self._free.pop() if high else self._free.pop(0)
        self._slots[slot] = 1
        return slot

    def take_pages(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or `None` and nothing taken when memory is short."""
        if self.pages_per_block == 0 or count == 0:
            return []
        if not self.fits(0, count):
            return None
        taken: list[int] = []
        while len(taken) < count:
            block = self._fullest()
            if block is None:
                block = self._free.pop()
                first = block * self.pages_per_block
                self._partial[block] = list(range(first, first + self.pages_per_block))
            pages = self._partial[block]
            wanted = count - len(taken)
            taken += pages[:wanted]
            del pages[:wanted]
            if not pages:
                del self._partial[block]
        for page in taken:
            self._pages[page] = 1
        return taken

    def _fullest(self) -> int | None:
        """The superblock with the fewest free pages: filling it up lets emptier ones become whole again."""
        if not self._partial:
            return None
        return min(self._partial, key=lambda block: (len(self._partial[block]), -block))

    def slot_owners(self, slot: int) -> int:
        """References to a slot; 0 for one that nobody has."""
        return self._slots.get(slot, 0)

    def page_owners(self, page: int) -> int:
        """References to a page; 0 for one that nobody has."""
        return self._pages.get(page, 0)

    def fits_beside(self, slots: int, pages: int, held_slots: Iterable[int], held_pages: Iterable[int]) -> bool:
        """Could `slots` and `pages` be taken if nothing but these slots and pages were held?"""
        if not self.pages_per_block:
            return not self.has_slots or slots <= self.num_blocks - len(set(held_slots) - {-1})
        used: dict[int, int] = {}
        for page in set(held_pages):
            block = page // self.pages_per_block
            used[block] = used.get(block, 0) + 1
        free = self.num_blocks - len(used) - (len(set(held_slots) - {-1}) if self.has_slots else 0)
        loose = sum(self.pages_per_block - count for count in used.values())
        blocks = -(-max(0, pages - loose) // self.pages_per_block)
        return blocks + (slots if self.has_slots else 0) <= free

    def retain_slot(self, slot: int) -> None:
        """One more owner."""
        if slot >= 0:
            self._slots[slot] += 1

    def retain_pages(self, pages: Iterable[int]) -> None:
        """One more owner of each."""
        for page in pages:
            self._pages[page] += 1

    def release_slot(self, slot: int) -> None:
        """One owner less; the last one frees the superblock."""
        if slot < 0:
            return
        self._slots[slot] -= 1
        if self._slots[slot] == 0:
            del self._slots[slot]
            insort(self._free, slot)

    def release_pages(self, pages: Iterable[int]) -> None:
        """One owner less of each; a superblock without used pages is free again."""
        for page in pages:
            self._pages[page] -= 1
            if self._pages[page]:
                continue
            del self._pages[page]
            block = page // self.pages_per_block
            loose = self._partial.setdefault(block, [])
            insort(loose, page)
            if len(loose) == self.pages_per_block:
                del self._partial[block]
                insort(self._free, block)

    def check_integrity(self, slots: Iterable[int] = (), pages: Iterable[int] = ()) -> None:
        """`AssertionError` unless free + slots + page blocks = all, and the owners named are those that are counted.

        `slots`, `pages`: one entry for each reference that somebody holds.
        """
        holding = {page // self.pages_per_block for page in self._pages}
        kinds = [set(self._free), set(self._slots), holding | set(self._partial)]
        assert sum(map(len, kinds)) == self.num_blocks == len(set().union(*kinds)), (
            "a superblock is lost or owned twice"
        )
        assert self._free == sorted(set(self._free))
        for block in holding | set(self._partial):
            used = sum(1 for page in self._pages if page // self.pages_per_block == block)
            loose = self._partial.get(block, [])
            assert used + len(loose) == self.pages_per_block, f"superblock {block} has lost pages"
            assert used > 0, f"superblock {block} holds only free pages"
            assert not set(loose) & set(self._pages)
        for held, counted in ((slots, self._slots), (pages, self._pages)):
            owners: dict[int, int] = {}
            for index in held:
                if index >= 0:
                    owners[index] = owners.get(index, 0) + 1
            assert owners == counted, f"references counted {counted}, held {owners}"
