"""Shared segments: reuse, and the limit on their bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from service.encoding.segments import SMALLEST, Segment, SegmentPool, open_segment, rounded

KIB = 1 << 10


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(1024 * KIB)
    yield pool
    pool.close()
    pool.close()
    assert pool.bytes == 0


def take(pool: SegmentPool, size: int) -> Segment:
    found = pool.take(size)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, SMALLEST), (SMALLEST, SMALLEST), (SMALLEST + 1, 2 * SMALLEST), (200_000, 1 << 18), (1 << 20, 1 << 20)],
)
def test_sizes_are_powers_of_two(size: int, segment: int) -> None:
    assert rounded(size) == segment


@pytest.mark.parametrize(
    ("left", "wanted", "again"),
    [
        pytest.param(128, 128, True, id="equal"),
        pytest.param(256, 128, True, id="twice"),
        pytest.param(512, 128, False, id="four-times"),
        pytest.param(64, 128, False, id="half"),
        pytest.param(128, 65, True, id="by-its-rounded-size"),
    ],
)
def test_a_segment_serves_again_for_images_of_about_its_size(
    pool: SegmentPool, left: int, wanted: int, again: bool
) -> None:
    """A segment is reused for images from its own size down to half of it: a small image must not hold a large
    segment."""
    first = take(pool, left * KIB)
    pool.give_back(first)
    found = pool.take(wanted * KIB)
    assert found is not None
    assert (found[0] is first, found[1]) == (again, not again)
    assert found[0].size >= wanted * KIB and pool.taken_bytes == found[0].size


def test_a_segment_is_in_one_hand_at_a_time(pool: SegmentPool) -> None:
    first, second = take(pool, 64 * KIB), take(pool, 64 * KIB)
    assert first is not second
    pool.give_back(first)
    assert take(pool, 64 * KIB) is first


def test_the_bound_holds_for_all_together(pool: SegmentPool) -> None:
    """Segments in use make others wait; free ones of another size are closed, oldest first, and no more than
    necessary."""
    taken = take(pool, 512 * KIB)
    small = [take(pool, 128 * KIB) for _ in range(4)]
    assert pool.bytes == pool.taken_bytes == 1024 * KIB and pool.take(64 * KIB) is None
    for segment in small[:3]:
        pool.give_back(segment)
    assert pool.take(512 * KIB) is None, "384 KiB are free, and what is taken is not"
    assert pool.closed == []
    take(pool, 256 * KIB)
    assert pool.closed == [small[0].number, small[1].number] and pool.bytes == 1024 * KIB
    pool.give_back(taken)
    assert take(pool, 512 * KIB) is taken
    with pytest.raises(ValueError, match=rf"{1024 * KIB + 1} bytes in a segment of {2048 * KIB}, but all"):
        pool.take(1024 * KIB + 1)


def test_the_error_has_the_segment_that_would_be_too_large() -> None:
    """Segments are powers of two, so that one may be too large for what its image alone would leave room for."""
    with pytest.raises(ValueError, match=f"{150 * KIB} bytes in a segment of {256 * KIB}, but all .* {192 * KIB}$"):
        SegmentPool(192 * KIB).take(150 * KIB)


def test_the_oldest_free_segments_make_room(pool: SegmentPool) -> None:
    free = [take(pool, 256 * KIB) for _ in range(4)]
    for segment in free:
        pool.give_back(segment)
    take(pool, 512 * KIB)
    assert pool.closed == [free[0].number, free[1].number] and pool.bytes == 1024 * KIB
    assert take(pool, 256 * KIB) is free[2]


def test_a_full_machine_costs_the_free_segments_and_then_is_an_error(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = take(pool, 64 * KIB)
    pool.give_back(kept)
    failures = [OSError(28, "No space left on device")]
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if failures:
            raise failures.pop()
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = pool.take(256 * KIB)
    assert found is not None and found[1] and pool.closed == [kept.number] and pool.bytes == 256 * KIB
    failures.append(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space"):
        pool.take(512 * KIB)
    assert pool.taken_bytes == 256 * KIB


def test_both_sides_see_the_same_bytes(pool: SegmentPool) -> None:
    segment = take(pool, 1000)
    other = open_segment(segment.number, os.dup(segment.descriptor))
    segment.tensor(64, (3, 2), torch.float32).copy_(torch.arange(6.0).view(3, 2))
    assert other.tensor(64, (3, 2), torch.float32).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert other.size == segment.size == SMALLEST
    other.close()
