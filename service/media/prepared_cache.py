"""Caches the patches of prepared files, so that a repeated image is neither decoded nor cut again.

The handoff caches the encoder's rows; this cache saves the work before that. The key of an entry is a hash of the
tenant and the file's bytes, so no tenant can observe another tenant's files.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from threading import Lock

from service.media.prepared import PreparedItem

MAX_ITEMS = 256
"""Largest number of items. In a server, each holds a file descriptor, and a process may be limited to 1,024 of them."""


class PreparedCache:
    """The most recently used items, up to `max_bytes` of patches. Thread-safe."""

    def __init__(self, max_bytes: int, max_items: int = MAX_ITEMS) -> None:
        """`max_bytes`: 0 turns the cache off."""
        self._max_bytes, self._max_items = max_bytes, max_items
        self._lock = Lock()
        self._items: OrderedDict[bytes, PreparedItem] = OrderedDict()
        self._bytes = 0
        self._hits = 0

    def get(self, key: bytes) -> PreparedItem | None:
        """The item with this key, with a descriptor of its own; None if it is not cached."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            copied = _copied(found)
            self._hits += copied is not None
            return copied

    def put(self, key: bytes, item: PreparedItem) -> None:
        """Caches a copy of the item, which shares its patches, if it fits."""
        size = item.layout.nbytes
        if size > self._max_bytes:
            return
        kept = _copied(item)
        if kept is None:
            return
        with self._lock:
            replaced = self._items.pop(key, None)
            self._bytes += size - (0 if replaced is None else replaced.layout.nbytes)
            self._items[key] = kept
            while self._bytes > self._max_bytes or len(self._items) > self._max_items:
                _, dropped = self._items.popitem(last=False)
                self._bytes -= dropped.layout.nbytes

    def stats(self) -> dict[str, float]:
        """Number of hits since the start, and the items and bytes that are cached now."""
        with self._lock:
            return {
                "cache_hits": float(self._hits), "cache_items": float(len(self._items)),
                "cache_bytes": float(self._bytes),
            }  # fmt: skip

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self._bytes = 0


def _copied(item: PreparedItem) -> PreparedItem | None:
    """The item with a descriptor of its own; None if the process can have no more descriptors."""
    try:
        return item if item.file is None else replace(item, file=item.file.copy())
    except OSError:
        return None
