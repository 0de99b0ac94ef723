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
from collections.abc import Callable, Sequence
from itertools import count

import torch

from encoder.item import EncoderItem
from encoder.schedule import choose
from kernels.streams import mark
from service.encoding.entries import Entry, EntryState, Lease, Run, Work, separate
from service.encoding.entry_table import EntryTable


class Handoff:
    """The queue: limited in bytes, keyed by content."""

    def __init__(
        self, capacity_bytes: int, hidden: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        *, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`clock`: seconds, for arrivals, deadlines and the encoders' leases."""
        self._device = device
        self.dtype = dtype
        self._held = EntryTable(capacity_bytes, hidden, dtype, device)
        self.on_change: Callable[[], None] = lambda: None
        """Called, outside the lock, whenever an entry may have changed its state."""
        self._clock = clock
        self._lock = threading.Lock()
        self._tickets = count(1)

    @property
    def max_tokens(self) -> int:
        """The largest image that fits at all, in image tokens."""
        return self._held.capacity_bytes // self._held.row_bytes

    def lease(self, key: bytes, image: EncoderItem, priority: int = 0, deadline: float | None = None) -> Lease:
        """Takes a lease on the image's rows: available at once if they are cached, shared if they are being encoded,
        otherwise queued for the encoder. `deadline`: by the clock of the constructor. Raises ValueError for an
        image larger than the whole capacity, and for a key whose rows have another number."""
        if image.tokens > self.max_tokens:
            size = image.tokens * self._held.row_bytes
            raise ValueError(
                f"the image takes {image.tokens} tokens ({size} bytes of embeddings), above "
                f"the handoff bound of {self.max_tokens} tokens ({self._held.capacity_bytes} bytes)"
            )
        with self._lock:
            entry = known = self._held.by_key.get(key)
            if entry is None:
                entry = Entry(key, image.tokens, self._clock(), image=image)
            elif entry.tokens != image.tokens:
                raise ValueError(f"the image takes {image.tokens} tokens, but its key has {entry.tokens} already")
            else:
                self._held.counters["hits" if entry.state is EntryState.READY else "joins"] += 1
                self._held.cached.pop(key, None)
                entry.image = entry.image or image
            lease = Lease(self._release, entry, priority, deadline)
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
            parts = [Lease(self._release, entry, lease.priority, lease.deadline, run) for run in runs]
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
            if wanted.tokens * self._held.row_bytes > self._held.capacity_bytes - self._held.quarantined_bytes():
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
