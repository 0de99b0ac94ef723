"""The prefix cache evicts the checkpoint of the lowest value, by age and uses, but none that is being copied."""

from __future__ import annotations

import pytest

from decoder.blocks import SuperblockPool
from decoder.cached import Checkpoint
from decoder.checkpoints import Placement
from decoder.prefix_cache import PrefixCache
from decoder.request import DecoderRequest
from decoder.sampling import SamplingParams
from decoder.sequence import Sequence

SLOT_BYTES = 100


class Shelf:
    """A cache of states only, each checkpoint worth its gain; `kept` returns the names of those left."""

    def __init__(self, slots: int = 64, *, pages: int = 0, page_bytes: int = 0) -> None:
        self.pool = SuperblockPool(slots, pages)
        placement = Placement("auto", 4, 4, 4)
        self.cache = PrefixCache(self.pool, placement, page_bytes=page_bytes, slot_bytes=SLOT_BYTES)
        self.sequences: dict[str, Sequence] = {}
        self.checkpoints: dict[str, Checkpoint] = {}

    def put(self, name: str, gain: int, tokens: int = 4) -> Checkpoint:
        sequence = Sequence(
            DecoderRequest(name, [1] * (tokens + 1), SamplingParams(max_tokens=1), salt=name.encode()), 0, 1
        )
        taken = self.pool.take_pages(-(-(tokens + 1) // 4))
        slot = self.pool.take_slot()
        assert taken is not None and slot is not None
        sequence.held.pages = taken
        made = self.cache.insert(sequence, tokens, slot, gain)
        assert made is not None
        self.pool.release_pages(taken)
        self.sequences[name], self.checkpoints[name] = sequence, made
        return made

    def use(self, name: str) -> None:
        hit = self.cache.lookup(self.sequences[name])
        assert hit.checkpoint is self.checkpoints[name]
        self.cache.use(self.sequences[name], hit)

    def evict(self, below: float | None = None) -> str | None:
        """The name of the evicted checkpoint."""
        before = self.kept
        done = self.cache.evict(below)
        self.cache.check_integrity()
        gone = before - self.kept
        assert len(gone) == done
        return gone.pop() if gone else None

    @property
    def kept(self) -> set[str]:
        live = self.cache.order
        return {name for name, checkpoint in self.checkpoints.items() if checkpoint in live}


def test_the_smallest_gain_goes_first() -> None:
    shelf = Shelf()
    for name, gain in (("b", 20), ("a", 10), ("c", 30)):
        shelf.put(name, gain)
    assert [shelf.evict() for _ in range(4)] == ["a", "b", "c", None]
    assert shelf.pool.free_blocks == 64 and shelf.cache.counters["evicted"] == 3


def test_of_equal_worth_the_older_goes_first() -> None:
    shelf = Shelf()
    for name in "abc":
        shelf.put(name, 10)
    assert [shelf.evict() for _ in range(3)] == ["a", "b", "c"]


def test_uses_count() -> None:
    """Ten tokens saved three times are worth more than twenty saved once, and less than forty."""
    shelf = Shelf()
    for name, gain in (("often", 10), ("once", 20), ("large", 40)):
        shelf.put(name, gain)
    shelf.use("often")
    shelf.use("often")
    assert shelf.checkpoints["often"].uses == 3
    assert [shelf.evict() for _ in range(3)] == ["once", "often", "large"]


def test_being_asked_for_is_a_use_only_of_recency() -> None:
    """A cached state that would be cached again counts as recently used, but its number of uses does not change."""
    shelf = Shelf()
    first, _ = shelf.put("a", 10), shelf.put("b", 10)
    assert shelf.cache.holds(shelf.sequences["a"], 4) and first.uses == 1
    assert not shelf.cache.holds(shelf.sequences["a"], 3)
    assert shelf.evict() == "b"


def test_what_is_never_used_again_ages() -> None:
    """Each eviction raises the worth of what is added or used later: a large old checkpoint is evicted after ten small
    ones, and not before."""
    shelf = Shelf()
    shelf.put("old", 100)
    gone = []
    for number in range(12):
        shelf.put(f"new {number}", 10)
        gone.append(shelf.evict())
    assert gone[:9] == [f"new {number}" for number in range(9)]
    assert "old" in gone[9:11]


def test_what_is_used_does_not_age() -> None:
    shelf = Shelf()
    shelf.put("old", 100)
    for number in range(30):
        shelf.put(f"new {number}", 10)
        assert shelf.evict() == f"new {number}"
        shelf.checkpoints["old"].uses = 1
        shelf.use("old")


def test_the_clock_never_goes_back() -> None:
    shelf = Shelf()
    shelf.put("a", 50)
    shelf.put("b", 60)
    assert shelf.evict() == "a" and shelf.cache.order.worth(10) == 60
    shelf.checkpoints["b"].worth = 0  # the value in the heap counts, not this one
    assert shelf.evict() == "b" and shelf.cache.order.worth(10) == 70


def test_bytes_count_against_it() -> None:
    """A long prefix whose pages take the bytes of two states is worth half of what it saves."""
    shelf = Shelf(pages=4, page_bytes=50)
    assert shelf.cache.order.worth(4) == pytest.approx(4 * 150 / 150)
    assert shelf.cache.order.worth(16) == pytest.approx(16 * 150 / 300)
    assert shelf.cache.order.worth(17, uses=2) == pytest.approx(2 * 17 * 150 / 350)


@pytest.mark.parametrize(("below", "gone"), [(9.9, None), (10, None), (10.1, "a"), (None, "a")])
def test_only_checkpoints_of_less_worth_are_evicted(below: float | None, gone: str | None) -> None:
    shelf = Shelf()
    shelf.put("a", 10)
    assert shelf.evict(below) == gone
    assert (shelf.cache.counters["evicted"], len(shelf.kept)) == ((1, 0) if gone else (0, 1))


def test_what_is_being_copied_from_stays_and_comes_next_when_it_is_over() -> None:
    shelf = Shelf()
    for name, gain in (("copied", 10), ("b", 20), ("c", 30)):
        shelf.put(name, gain)
    slot = shelf.checkpoints["copied"].slot
    shelf.pool.retain_slot(slot)
    assert shelf.evict() == "b" and "copied" in shelf.kept
    assert shelf.cache.order.worth(0) == 20
    shelf.pool.release_slot(slot)
    assert [shelf.evict() for _ in range(3)] == ["copied", "c", None]


def test_nothing_is_evicted_while_everything_is_being_copied_from() -> None:
    shelf = Shelf()
    slots = [shelf.put(name, 10).slot for name in "ab"]
    for slot in slots:
        shelf.pool.retain_slot(slot)
    assert shelf.evict() is None and shelf.cache.counters["evicted"] == 0
    for slot in slots:
        shelf.pool.release_slot(slot)
    assert [shelf.evict(), shelf.evict()] == ["a", "b"]


def test_a_slot_is_taken_in_place_of_less_worthy_ones_only() -> None:
    shelf = Shelf(slots=2)
    shelf.put("a", 10)
    shelf.put("b", 20)
    assert shelf.cache.take_slot(10) is None and shelf.kept == {"a", "b"}
    assert shelf.cache.take_slot(11) is not None and shelf.kept == {"b"}


def test_an_equal_checkpoint_is_not_kept_twice() -> None:
    shelf = Shelf()
    first = shelf.put("a", 10)
    free, slot = shelf.pool.free_blocks, shelf.pool.take_slot()
    assert slot is not None and shelf.cache.insert(shelf.sequences["a"], 4, slot, 99) is None
    assert shelf.pool.free_blocks == free and shelf.kept == {"a"} and first.gain == 10


def test_the_heap_does_not_grow_with_uses() -> None:
    shelf = Shelf()
    for name in "abc":
        shelf.put(name, 10)
    for _ in range(500):
        shelf.use("a")
    assert len(shelf.cache.order._heap) <= 64 + 4 * 3 + 1
    assert [shelf.evict() for _ in range(3)] == ["b", "c", "a"]
