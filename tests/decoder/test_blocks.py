"""Superblocks are never lost, shared by mistake or fragmented without limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoder.blocks import SuperblockPool


class PoolMachine(RuleBasedStateMachine):
    """Takes, shares and releases slots and pages in any order, compared with a plain list of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SuperblockPool(7, 3)
        self.slots: list[int] = []
        self.pages: list[int] = []
        self.ceded_slots: list[int] = []
        self.ceded_pages: list[int] = []

    @rule()
    def take_slot(self) -> None:
        possible = self.pool.fits(1, 0)
        slot = self.pool.take_slot()
        assert (slot is not None) == possible
        if slot is not None:
            assert slot not in self.slots + self.ceded_slots
            self.slots.append(slot)

    @rule(count=st.integers(0, 8))
    def take_pages(self, count: int) -> None:
        possible = self.pool.fits(0, count)
        pages = self.pool.take_pages(count)
        assert (pages is not None) == possible
        if pages is not None:
            assert len(pages) == count
            assert not set(pages) & {*self.pages, *self.ceded_pages}
            self.pages += pages

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def share_slot(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        self.pool.retain_slot(slot)
        self.slots.append(slot)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def share_page(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.pages))
        self.pool.retain_pages([page])
        self.pages.append(page)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release_slot(self, data: st.DataObject) -> None:
        slot = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        self.pool.release_slot(slot)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def release_pages(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.pages) - 1))
        self.pool.release_pages(self.pages[place:])
        del self.pages[place:]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def cede_slot(self, data: st.DataObject) -> None:
        slot = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        self.pool.cede([slot])
        self.ceded_slots.append(slot)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def cede_pages(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.pages) - 1))
        self.pool.cede(pages=self.pages[place:])
        self.ceded_pages += self.pages[place:]
        del self.pages[place:]

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def share_ceded_page(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.pages))
        self.pool.retain_pages([page], ceded=True)
        self.ceded_pages.append(page)

    @precondition(lambda self: self.ceded_slots or self.ceded_pages)
    @rule()
    def release_ceded(self) -> None:
        for slot in self.ceded_slots:
            self.pool.release_slot(slot, ceded=True)
        self.pool.release_pages(self.ceded_pages, ceded=True)
        self.ceded_slots, self.ceded_pages = [], []

    @precondition(lambda self: self.ceded_slots or self.ceded_pages)
    @rule()
    def claim_all(self) -> None:
        self.pool.claim(self.ceded_slots, self.ceded_pages)
        self.slots += self.ceded_slots
        self.pages += self.ceded_pages
        self.ceded_slots, self.ceded_pages = [], []

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity(self.slots, self.pages, self.ceded_slots, self.ceded_pages)
        pages, slots = {*self.pages, *self.ceded_pages}, {*self.slots, *self.ceded_slots}
        held = {page // 3 for page in pages}
        assert self.pool.free_blocks == 7 - len(slots) - len(held)
        assert self.pool.loose_pages == 3 * len(held) - len(pages)

    @rule(slots=st.integers(0, 3), pages=st.integers(0, 22))
    def fits_beside_what_is_needed(self, slots: int, pages: int) -> None:
        """Compared with a search over the needed references."""
        blocks = {page // 3 for page in self.pages}
        free = 7 - len(blocks) - len(set(self.slots))
        missing = max(0, pages - (3 * len(blocks) - len(set(self.pages))))
        expected = slots + -(-missing // 3) <= free
        assert self.pool.fits_beside(slots, pages, self.pool.needed) == expected

    @precondition(lambda self: self.pool.loose_pages)
    @rule()
    def the_fullest_block_gives_the_next_page(self) -> None:
        """Among equally full ones the highest."""
        used: dict[int, int] = {}
        for page in {*self.pages, *self.ceded_pages}:
            used[page // 3] = used.get(page // 3, 0) + 1
        _, expected = max((count, block) for block, count in used.items() if count < 3)
        pages = self.pool.take_pages(1)
        assert pages is not None and pages[0] // 3 == expected
        self.pages += pages


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(0, 3), st.integers(0, 9))
def test_what_fits_can_be_taken_together(slots: int, pages: int) -> None:
    pool = SuperblockPool(4, 3)
    expected = slots + -(-pages // 3) <= 4
    assert pool.fits(slots, pages) == expected
    if expected:
        assert all(pool.take_slot() is not None for _ in range(slots))
        assert pool.take_pages(pages) is not None


def test_slots_come_low_and_pages_high() -> None:
    pool = SuperblockPool(4, 2)
    assert [pool.take_slot(), pool.take_slot()] == [0, 1]
    assert pool.take_pages(3) == [6, 7, 4]


def test_partial_blocks_fill_up_before_new_ones_are_opened() -> None:
    pool = SuperblockPool(3, 4)
    first = pool.take_pages(6)
    assert first is not None
    assert pool.free_blocks == 1
    pool.release_pages(first[:1])
    again = pool.take_pages(3)
    assert again is not None and pool.free_blocks == 1
    pool.check_integrity([], [*first[1:], *again])


def test_models_of_one_kind() -> None:
    states_only = SuperblockPool(2, 0)
    assert states_only.take_pages(100) == []
    assert states_only.fits(2, 100) and not states_only.fits(3, 0)
    pages_only = SuperblockPool(2, 1, has_slots=False)
    assert [pages_only.take_slot() for _ in range(5)] == [-1] * 5
    assert pages_only.take_pages(2) == [1, 0] and pages_only.take_pages(1) is None
    pages_only.release_slot(-1)
    pages_only.check_integrity([-1], [0, 1])


def test_integrity_notices_a_leak() -> None:
    pool = SuperblockPool(3, 2)
    pool.take_slot()
    with pytest.raises(AssertionError, match="references"):
        pool.check_integrity([], [])


def test_the_fullest_block_fills_up_first() -> None:
    """Two blocks with one and two free pages of four: the next pages come from the fuller one, so that the other can
    become free; released pages change which one that is."""
    pool = SuperblockPool(3, 4)
    taken = pool.take_pages(12)
    assert taken == [8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3]
    pool.release_pages([8, 4, 5, 0, 1, 2])
    assert pool.take_pages(2) == [8, 4], "the block with one free page, then that with two"
    pool.release_pages([6, 7, 8])
    assert pool.take_pages(1) == [8]
    pool.release_pages([3])
    assert pool.free_blocks == 1 and pool.take_pages(3) == [5, 6, 7]
    pool.check_integrity([], [4, 5, 6, 7, 8, 9, 10, 11])


def test_a_long_life_leaves_no_list_that_grows() -> None:
    pool = SuperblockPool(4, 8)
    for _ in range(2000):
        pages = pool.take_pages(3)
        assert pages is not None
        pool.release_pages(pages[::-1])
    first = pool.take_pages(11)
    assert first is not None
    for page in first * 50:
        pool.release_pages([page])
        assert pool.take_pages(1) == [page]
    assert len(pool._partly_free._fullness) <= 64 + 4 * 4


@pytest.mark.parametrize("kind", ["slot", "page"])
def test_what_nobody_has_cannot_be_shared(kind: str) -> None:
    pool = SuperblockPool(3, 2)
    pages = pool.take_pages(1)
    assert pages == [4]
    with pytest.raises(AssertionError, match="must have references" if kind == "page" else "slot 0 has no references"):
        pool.retain_pages([4, 5]) if kind == "page" else pool.retain_slot(0)
    pool.check_integrity([], [4])


def test_integrity_notices_memory_that_is_ceded_by_mistake() -> None:
    pool = SuperblockPool(3, 2)
    pool.take_slot()
    pool.cede([0])
    pool.check_integrity([], [], [0], [])
    with pytest.raises(AssertionError, match="needed references"):
        pool.check_integrity([0], [])
