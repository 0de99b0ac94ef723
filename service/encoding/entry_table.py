"""The entries of the handoff queue: their states, the order in which they wait, and the space for their rows."""

from __future__ import annotations

from collections import OrderedDict, deque

import torch

from kernels.streams import mark
from service.encoding.entries import (
    MAX_ATTEMPTS,
    EncoderUnavailable,
    EncodingFailed,
    Entry,
    EntryState,
    Work,
    separate,
)


class EntryTable:
    """All entries by key, the queue of those that wait for space, and the limited space. The caller must hold a
    lock."""

    def __init__(self, capacity_bytes: int, hidden: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.capacity_bytes, self.row_bytes = capacity_bytes, hidden * dtype.itemsize
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self.by_key: dict[bytes, Entry] = {}
        self.waiting: deque[Entry] = deque()
        # READY entries without leases, least recently used first.
        self.cached: OrderedDict[bytes, Entry] = OrderedDict()
        self.quarantined: dict[int, Work] = {}
        self.used = 0  # bytes of entries that have rows, and of quarantined ones
        names = ("hits", "joins", "misses", "evictions", "revocations", "failures", "retries", "expirations", "late")
        self.counters = dict.fromkeys(names, 0)

    def add(self, entry: Entry) -> None:
        """Adds an entry with a new key, which waits for space."""
        self.by_key[entry.key] = entry
        self.waiting.append(entry)
        self.counters["misses"] += 1
        self.reserve()

    def revoke_for(self, wanted: Entry) -> bool:
        """Evicts READY rows although they are leased, until `wanted` fits; True if it has its space then."""
        for entry in list(self.by_key.values()):
            if self.fits(wanted):
                break
            if entry.rows is not None and entry.key not in self.cached:
                self._free_rows(entry)
                entry.state = EntryState.WAITING
                self.waiting.append(entry)
                self.counters["revocations"] += 1
        self.reserve()
        return wanted.state is EntryState.RESERVED

    def flush(self) -> int:
        """Evicts all cached rows; returns the bytes freed."""
        before = self.used
        for entry in list(self.cached.values()):
            self.evict(entry)
        self.reserve()
        return before - self.used

    def expire(self, entry: Entry) -> Work:
        """Revokes an entry from its encoder, which may still write: its space becomes QUARANTINED. Returns its work."""
        assert entry.writer is not None
        work = self.quarantined[entry.writer.ticket] = entry.writer
        entry.rows = entry.writer = entry.expires = None
        self.counters["expirations"] += 1
        self.again(entry, EncodingFailed("the encoder did not write the image's rows within its lease"))
        return work

    def release(self, entry: Entry) -> None:
        """To be called when no lease on the entry is left."""
        if entry.state is EntryState.READY:
            self.to_cache(entry)
        # Not started, and no request waits for it any more.
        elif entry.state not in (EntryState.WRITING, EntryState.FAILED):
            self.drop(entry)
        self.reserve()

    def end_writing(self, work: Work) -> Entry | None:
        """The encoder of `work` has finished with it. None if its lease had run out: its quarantined space is then
        free."""
        if self.quarantined.pop(work.ticket, None) is not None:
            self.used -= len(work.rows) * self.row_bytes
            self.counters["late"] += 1
            return None
        entry = self.by_key[work.key]
        assert entry.writer is work, f"the end of writing {work.ticket}, which is not in progress"
        entry.writer = entry.expires = None
        return entry

    def again(self, entry: Entry, error: Exception) -> None:
        """After a failed attempt: the entry is RESERVED again, or waits for space ahead of later ones."""
        entry.attempts += 1
        if entry.rows is None:
            entry.state = EntryState.WAITING
            self.waiting.appendleft(entry)
        else:
            entry.state = EntryState.RESERVED
        if not entry.leases:
            self.drop(entry)
        elif entry.attempts >= MAX_ATTEMPTS:
            self.fail(entry, EncodingFailed(f"{entry.attempts} attempts to encode the image have failed: {error}"))
        else:
            self.counters["retries"] += 1

    def fail(self, entry: Entry, error: Exception) -> None:
        """Removes the entry; each lease gets an error of its own with the message of `error`."""
        for lease in entry.leases:
            lease.error = separate(error)
        self.counters["failures"] += 1
        self.drop(entry)
        entry.state = EntryState.FAILED

    def cached_bytes(self) -> int:
        return sum(e.tokens for e in self.cached.values()) * self.row_bytes

    def quarantined_bytes(self) -> int:
        return sum(len(work.rows) for work in self.quarantined.values()) * self.row_bytes

    def fits(self, entry: Entry) -> bool:
        return self.used - self.cached_bytes() + entry.tokens * self.row_bytes <= self.capacity_bytes

    def reserve(self) -> None:
        """Grants space in order of arrival, evicting cached rows, until the first entry that does not fit. An entry for
        which the device has no memory, even without cached rows, fails."""
        while self.waiting and self.fits(self.waiting[0]):
            entry = self.waiting[0]
            need = entry.tokens * self.row_bytes
            while self.used + need > self.capacity_bytes:
                self.evict(next(iter(self.cached.values())))
            try:
                entry.rows = torch.empty(entry.tokens, self._hidden, dtype=self._dtype, device=self._device)
            except RuntimeError:  # torch's error for a lack of memory
                if self.cached:
                    self.evict(next(iter(self.cached.values())))
                else:
                    words = f"no memory for the image's {entry.tokens} tokens ({need} bytes of embeddings)"
                    self.fail(entry, EncoderUnavailable(words))
                continue
            self.waiting.popleft()
            entry.reserved = mark(self._device)
            self.used += need
            entry.state = EntryState.RESERVED

    def to_cache(self, entry: Entry) -> None:
        entry.image = None
        self.cached[entry.key] = entry
        self.cached.move_to_end(entry.key)

    def evict(self, entry: Entry) -> None:
        del self.cached[entry.key]
        self.counters["evictions"] += 1
        self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Removes the entry and frees its space."""
        if entry.state is EntryState.WAITING:
            self.waiting.remove(entry)
        self._free_rows(entry)
        entry.image = None
        del self.by_key[entry.key]

    def _free_rows(self, entry: Entry) -> None:
        if entry.rows is not None:
            entry.rows = None
            self.used -= entry.tokens * self.row_bytes

    def stats(self) -> dict[str, int]:
        """As `Handoff.stats`."""
        states = dict.fromkeys(EntryState, 0)
        for entry in self.by_key.values():
            states[entry.state] += 1
        return {
            "capacity_bytes": self.capacity_bytes,
            "used_bytes": self.used,
            "cached_bytes": self.cached_bytes(),
            "quarantined_bytes": self.quarantined_bytes(),
            "leases": sum(len(e.leases) for e in self.by_key.values()),
            "cached": len(self.cached),
            "quarantined": len(self.quarantined),
            **{state.value: count for state, count in states.items() if state is not EntryState.FAILED},
            **self.counters,
        }

    def check_integrity(self, *, idle: bool) -> None:
        """As `Handoff.check_integrity`."""
        held = sum(e.tokens * self.row_bytes for e in self.by_key.values() if e.rows is not None)
        held += self.quarantined_bytes()
        assert held == self.used <= self.capacity_bytes, (held, self.used, self.capacity_bytes)
        for entry in self.by_key.values():
            has_rows = entry.state in (EntryState.RESERVED, EntryState.WRITING, EntryState.READY)
            assert has_rows == (entry.rows is not None), entry.state
            assert (entry.writer is not None) == (entry.state is EntryState.WRITING), entry.state
            assert entry.expires is None or entry.writer is not None, "a lease without a writer"
            assert (entry in self.waiting) == (entry.state is EntryState.WAITING), entry.state
            assert (entry.key in self.cached) == (entry.state is EntryState.READY and not entry.leases)
            assert entry.leases or entry.state in (EntryState.READY, EntryState.WRITING), "an entry without leases"
        written = {id(e.rows) for e in self.by_key.values() if e.rows is not None}
        assert not written & {id(w.rows) for w in self.quarantined.values()}, "quarantined space is in use"
        if idle:
            assert len(self.cached) == len(self.by_key), "leases or encodings are left behind"
            assert not self.quarantined, "a writer has not ended"
