"""The embedding handoff queue between encoder and decoder, which is also the embedding cache.

Entry states, and who moves them:

    (waiting)    no space yet          -> RESERVED  by `reserve`, in order of arrival
    RESERVED     space, no writer      -> WRITING   by `take`, most urgent first, for an encoder
    WRITING      an encoder writes     -> READY     by `publish`; FAILED by `fail` (every waiter gets an error of its
                                                    own); RESERVED again by `retry`, FAILED after too many of them
    READY        leased n times        -> CACHED    when the last lease is released
    CACHED       least recently used   -> evicted   when `reserve` needs the bytes

and of the space of an entry whose writer kept it past its lease:

    QUARANTINED  may still be written  -> free      when that writer has ended: `publish`, `fail` or `retry`

Meanwhile the entry itself waits for other space and another encoder.

Space is reserved before the encoder starts, so an encoding never has nowhere to go: reserved bytes are the encoders'
credit, and there is no other. A key in flight is joined, so an image is encoded once however many requests wait for
it. Ownership: the entry's rows belong to the queue; a lease keeps them alive, and is released by the decoder after the
step that consumed the last row has executed, or when the request ends for any reason. A writer owns the space of its
`Work` from `take` until it reports its end, which it does exactly once. All methods may be called from any thread.

Liveness. Reservations are granted strictly in order, so a large image is never starved by small ones. What can
stall is a set of requests that hold READY rows while each waits for space; `unblock` then takes rows back (they are
encoded again later) until the image that waits longest fits, so each pass advances a request or frees an entry.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count

import torch

from encoder.item import EncoderItem
from encoder.schedule import choose
from kernels.streams import mark
from service.encoding.entries import (
    MAX_ATTEMPTS,
    EncoderUnavailable,
    EncodingFailed,
    Entry,
    EntryState,
    Lease,
    Run,
    Work,
    separate,
)


class Handoff:
    """The queue: limited in bytes, keyed by content."""

    def __init__(
        self, capacity_bytes: int, hidden: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        *, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`clock`: seconds, for arrivals, deadlines and the encoders' leases."""
        self.capacity_bytes = capacity_bytes
        self._device = device
        self.dtype = dtype
        self._held = _Entries(capacity_bytes, hidden, dtype, device)
        self.counters = self._held.counters
        self.on_change: Callable[[], None] = lambda: None
        """Called, outside the lock, whenever an entry may have changed its state."""
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets = count(1)

    @property
    def max_tokens(self) -> int:
        """The largest image that fits at all, in image tokens."""
        return self.capacity_bytes // self._held.row_bytes

    def lease(
        self, key: bytes, image: EncoderItem, owner: str, priority: int = 0, deadline: float | None = None
    ) -> Lease:
        """Takes a lease on the image's rows: available at once if they are cached, shared if they are being encoded,
        otherwise queued for the encoder. `deadline`: by the clock of the constructor. Raises ValueError for an
        image larger than the whole capacity, and for a key whose rows have another number."""
        if image.tokens > self.max_tokens:
            size = image.tokens * self._held.row_bytes
            raise ValueError(
                f"the image takes {image.tokens} tokens ({size} bytes of embeddings), above "
                f"the handoff bound of {self.max_tokens} tokens ({self.capacity_bytes} bytes)"
            )
        with self._lock:
            entry = known = self._held.by_key.get(key)
            if entry is None:
                entry = Entry(key, image.tokens, self._clock(), image=image)
            elif entry.tokens != image.tokens:
                raise ValueError(f"the image takes {image.tokens} tokens, but its key has {entry.tokens} already")
            else:
                self.counters["hits" if entry.state is EntryState.READY else "joins"] += 1
                self._held.cached.pop(key, None)
                entry.image = entry.image or image
            lease = Lease(self._release, entry, owner, priority, deadline)
            entry.leases.add(lease)
            if known is None:
                self._held.add(entry)
        self.on_change()
        return lease

    # -- for encoders --------------------------------------------------------------------------------------------------

    def take(self, max_tokens: int | None = None, *, lease: float | None = None, idle: bool = True) -> list[Work]:
        """Takes RESERVED images for one step of an encoder, about `max_tokens` together (None: all of them), in the
        order of `encoder.schedule`; they become WRITING, for at most `lease` seconds (None: without limit).

        An image with one attempt left is taken before all others, and alone: it may be what ended its encoders, and
        with them the attempts of others. `idle`: whether there is an idle encoder for such an image; if not, nothing
        else is taken until there is one.
        """
        taken: list[Work] = []
        with self._lock:
            reserved = [e for e in self._held.by_key.values() if e.state is EntryState.RESERVED]
            if last := [e for e in reserved if e.last_attempt]:
                reserved = last[:1] if idle else []
            if not reserved:
                return []
            step = max_tokens or sum(e.tokens for e in reserved)
            for position in choose([e.urgency for e in reserved], step):
                entry = reserved[position]
                assert entry.image is not None and entry.rows is not None
                entry.state = EntryState.WRITING
                entry.writer = Work(
                    entry.key, entry.image, entry.rows, next(self._tickets), entry.urgency.priority, entry.reserved,
                    entry.last_attempt,
                )  # fmt: skip
                entry.expires = None if lease is None else self._clock() + lease
                taken.append(entry.writer)
        return taken

    def publish(self, works: Sequence[Work], counts: Sequence[tuple[int, ...] | None] = ()) -> None:
        """The rows of `works` have been written, on a GPU by operations on the current stream; `counts`: for each, the
        rows of its attention sequences."""
        written = mark(self._device)
        with self._lock:
            for work, rows in zip(works, counts or [None] * len(works), strict=True):
                if (entry := self._held.end_writing(work)) is not None:
                    # A second encoding keeps the first one's counts: prompts have been laid out by them.
                    entry.counts = entry.counts or rows or (entry.tokens,)
                    entry.state, entry.written = EntryState.READY, written
                    if not entry.leases:
                        self._held.to_cache(entry)
            self._held.reserve()
        self.on_change()

    def fail(self, work: Work, error: Exception) -> None:
        """The image cannot be encoded: each waiting request gets an error with the message of `error`, the space is
        freed, and the next request for the image tries again."""
        with self._lock:
            if (entry := self._held.end_writing(work)) is not None:
                self._held.fail(entry, error)
            self._held.reserve()
        self.on_change()

    def retry(self, work: Work, error: Exception) -> None:
        """An attempt has failed for a reason other than the image: the image may be taken again, unless no request
        waits for it any more or MAX_ATTEMPTS have failed."""
        with self._lock:
            if (entry := self._held.end_writing(work)) is not None:
                self._held.again(entry, error)
            self._held.reserve()
        self.on_change()

    def expire(self) -> list[Work]:
        """Revokes images from encoders whose lease has run out. The encoders may still write: the space is QUARANTINED
        until they have finished. Returns what was revoked."""
        with self._lock:
            now = self._clock()
            due = [e for e in self._held.by_key.values() if e.expires is not None and e.expires <= now]
            due.sort(key=lambda entry: entry.arrival, reverse=True)
            taken_back = [self._held.expire(entry) for entry in due]
            self._held.reserve()
        if taken_back:
            self.on_change()
        return taken_back

    def next_expiry(self) -> float | None:
        """When the next encoder's lease runs out, by the clock of the constructor."""
        with self._lock:
            return min((e.expires for e in self._held.by_key.values() if e.expires is not None), default=None)

    def seconds_left(self, work: Work) -> float | None:
        """Seconds until the earliest deadline of the requests that wait for it; None: no deadline."""
        with self._lock:
            entry = self._held.by_key.get(work.key)
            deadline = entry.urgency.deadline if entry is not None else None
        return None if deadline is None else deadline - self._clock()

    def pending_tokens(self) -> int:
        """Image tokens that are being encoded or wait to be."""
        with self._lock:
            return sum(e.tokens for e in self._held.by_key.values() if e.state is not EntryState.READY)

    def unwanted(self) -> list[Work]:
        """Images that are being encoded and that no request waits for any more."""
        with self._lock:
            return [e.writer for e in self._held.by_key.values() if e.writer is not None and not e.leases]

    def fail_reserved(self, error: Exception) -> int:
        """There is no encoder: all requests that wait for one get an error. Returns the number of images."""
        with self._lock:
            pending = (EntryState.RESERVED, EntryState.WAITING)
            doomed = [e for e in self._held.by_key.values() if e.state in pending]
            for entry in doomed:
                self._held.fail(entry, error)
            self._held.reserve()
        if doomed:
            self.on_change()
        return len(doomed)

    # -- for the decoder -----------------------------------------------------------------------------------------------

    def split(self, lease: Lease, runs: Sequence[Run]) -> list[Lease]:
        """Replaces a lease by one for each of `runs`, which have all of its rows."""
        with self._lock:
            entry = lease.entry
            parts = [Lease(self._release, entry, lease.owner, lease.priority, lease.deadline, run) for run in runs]
            for part in parts:
                part.error = lease.error and separate(lease.error)
            if lease in entry.leases:
                entry.leases.remove(lease)
                entry.leases.update(parts)
        return parts

    def unblock(self) -> bool:
        """Makes space for the image that has waited longest by evicting READY rows that requests have leased.

        To be called only while no request can advance: then none of these rows is what a request reads next, and each
        is encoded again later. True if the image now has its space; False if no image waits, or if an encoding in
        progress or the end of a quarantine will let a request advance. Evicted images are queued last, so within as
        many calls as images wait, one of them is the next that some request reads.
        """
        with self._lock:
            in_progress = (EntryState.RESERVED, EntryState.WRITING)
            if not self._held.waiting or any(e.state in in_progress for e in self._held.by_key.values()):
                return False
            wanted = self._held.waiting[0]
            if wanted.tokens * self._held.row_bytes > self.capacity_bytes - self._held.quarantined_bytes():
                return False
            granted = self._held.revoke_for(wanted)
        self.on_change()
        return granted

    def flush(self) -> int:
        """Evicts all cached rows; returns the bytes freed."""
        with self._lock:
            freed = self._held.flush()
        self.on_change()
        return freed

    def stats(self) -> dict[str, int]:
        """Bytes used, reserved, cached and quarantined, entries by state, and the counters."""
        with self._lock:
            return self._held.stats()

    def check_integrity(self, *, idle: bool = False) -> None:
        """`AssertionError` unless used = sum of the entries' rows and of quarantined space <= capacity, and queues and
        states agree; with `idle`, nothing may be leased, in progress or quarantined, so that used = cached."""
        with self._lock:
            self._held.check_integrity(idle=idle)

    def _release(self, lease: Lease) -> None:
        entry = lease.entry
        with self._lock:
            if lease not in entry.leases:
                return
            entry.leases.discard(lease)
            if not entry.leases:
                self._held.release(entry)
        self.on_change()


class _Entries:
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
