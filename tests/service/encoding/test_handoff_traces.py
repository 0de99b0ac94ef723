"""Worked traces of an embedding cache of ten rows, step by step."""

from __future__ import annotations

import pytest
import torch

from encoder.item import EncoderItem
from service.encoding.entries import Lease
from service.encoding.handoff import Handoff

HIDDEN = 2
ROW = HIDDEN * 4
SIZES = {b"A": 4, b"B": 5, b"C": 6}


class Cache:
    """A handoff of ten rows with a fast encoder."""

    def __init__(self) -> None:
        self.handoff = Handoff(10 * ROW, HIDDEN, torch.float32)

    def hold(self, key: bytes) -> Lease:
        """A lease, encoded at once if there is memory."""
        tokens = SIZES[key]
        lease = self.handoff.lease(key, EncoderItem((2, 2 * tokens), torch.zeros(4 * tokens, 3)))
        self.handoff.publish(self.handoff.take())
        return lease

    def pump(self) -> None:
        self.handoff.publish(self.handoff.take())

    @property
    def free_rows(self) -> int:
        return 10 - self.handoff.stats()["used_bytes"] // ROW

    @property
    def freeable_rows(self) -> int:
        """Rows without leases: free, or cached."""
        return self.free_rows + self.handoff.stats()["cached_bytes"] // ROW


@pytest.fixture
def full() -> tuple[Cache, list[Lease]]:
    cache = Cache()
    return cache, [cache.hold(b"A"), cache.hold(b"B")]


def test_pinned_rows_leave_no_room(full: tuple[Cache, list[Lease]]) -> None:
    cache, _ = full
    assert (cache.free_rows, cache.freeable_rows) == (1, 1)
    late = cache.hold(b"C")
    assert not late.ready and cache.free_rows == 1
    cache.handoff.check_integrity()


def test_a_hit_takes_its_rows_back_and_only_the_other_is_evicted(full: tuple[Cache, list[Lease]]) -> None:
    cache, leases = full
    for lease in leases:
        lease.release()
    assert (cache.free_rows, cache.freeable_rows) == (1, 10)
    again = cache.hold(b"A")
    assert again.ready and cache.freeable_rows == 6
    late = cache.hold(b"C")
    assert late.ready and again.ready
    assert cache.free_rows == 0 and cache.handoff.stats()["evictions"] == 1, "B alone went"
    cache.handoff.check_integrity()


def test_the_oldest_go_first_until_it_fits(full: tuple[Cache, list[Lease]]) -> None:
    cache, leases = full
    for lease in leases:
        lease.release()
    assert cache.hold(b"C").ready
    assert cache.free_rows == 4 and cache.handoff.stats()["evictions"] == 2
    cache.handoff.check_integrity()


def test_a_waiting_image_is_encoded_when_the_last_hold_ends(full: tuple[Cache, list[Lease]]) -> None:
    cache, leases = full
    shared = cache.hold(b"A")
    late = cache.hold(b"C")
    leases[0].release()
    cache.pump()
    assert not late.ready, "r2 still holds A"
    leases[1].release()
    cache.pump()
    assert late.ready and shared.ready and cache.free_rows == 0
    late.release()
    shared.release()
    cache.handoff.check_integrity(idle=True)


def test_one_image_twice_in_a_request_is_held_until_both_are_done() -> None:
    cache = Cache()
    first, second = cache.hold(b"A"), cache.hold(b"A")
    first.release()
    assert second.ready and cache.freeable_rows == 6
    second.release()
    assert cache.freeable_rows == 10
    cache.handoff.check_integrity(idle=True)
