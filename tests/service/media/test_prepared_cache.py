"""The cache of prepared images: hits, its two bounds, and that descriptors are shared and closed."""

from __future__ import annotations

import os

import torch
from descriptors import NO_MORE, limited_descriptors, open_descriptors
from hypothesis import given
from hypothesis import strategies as st

from encoder.item import EncoderItem
from service.media.prepared import PreparedItem
from service.media.prepared_cache import PreparedCache


def item(side: int, value: int = 0, *, sealed: bool = False) -> PreparedItem:
    """An image of `side * side` patches of one byte each."""
    patches = torch.full((side * side, 1), value, dtype=torch.uint8)
    made = PreparedItem(EncoderItem((side, side), patches, merge_size=1))
    return made.sealed() if sealed else made


def test_an_item_is_shared_by_descriptors_of_its_own() -> None:
    before = open_descriptors()
    cache, first = PreparedCache(100), item(3, 7, sealed=True)
    cache.put(b"a", first)
    assert first.file is not None
    os.close(first.file.take())
    found = [cache.get(b"a"), cache.get(b"a")]
    cache.clear()
    for each in found:
        assert each is not None and each.file is not None
        opened = PreparedItem(each.layout).opened(each.file.take())
        assert opened.encoder_item.patches.tolist() == [[7]] * 9
    del found, each, opened, first
    assert open_descriptors() == before
    assert cache.get(b"a") is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=40), st.integers(0, 60), st.integers(1, 4))
def test_the_most_recent_items_stay_within_both_bounds(
    used: list[tuple[int, int]], max_bytes: int, max_items: int
) -> None:
    cache = PreparedCache(max_bytes, max_items)
    kept: dict[bytes, int] = {}  # a model of the cache, oldest item first
    hits = 0
    for name, side in used:
        key = bytes([name])
        found = cache.get(key)
        assert (found is not None) == (key in kept)
        if found is not None:
            hits += 1
            assert found.layout.nbytes == kept[key]
            kept[key] = kept.pop(key)
        cache.put(key, item(side))
        if side * side <= max_bytes:
            kept.pop(key, None)
            kept[key] = side * side
            while sum(kept.values()) > max_bytes or len(kept) > max_items:
                del kept[next(iter(kept))]
        assert cache.stats() == {
            "cache_hits": hits, "cache_items": len(kept), "cache_bytes": sum(kept.values())
        }  # fmt: skip


def test_a_process_without_descriptors_only_loses_the_cache() -> None:
    cache, first = PreparedCache(100), item(2, sealed=True)
    cache.put(b"a", first)
    with limited_descriptors(NO_MORE):
        found = cache.get(b"a")
        cache.put(b"b", first)
    assert found is None and cache.stats()["cache_items"] == 1 and cache.get(b"a") is not None


def test_an_opened_image_keeps_no_descriptor_and_is_private() -> None:
    """The images of all requests of an engine are open at the same time."""
    sealed = item(8, sealed=True)
    assert sealed.file is not None
    before = open_descriptors()
    opened = [PreparedItem(sealed.layout).opened(sealed.file.copy().take()).encoder_item for _ in range(3)]
    assert open_descriptors() == before
    opened[0].patches[:] = 9
    assert torch.equal(opened[1].patches, opened[2].patches) and not torch.equal(opened[0].patches, opened[1].patches)
