"""The embedding handoff queue between encoder and decoder, which is also the embedding cache.

Entry states, and who moves them:

    (waiting)    no space yet          -> RESERVED  by `reserve`, in order of arrival
    RESERVED     space, no writer      -> WRITING   by `take`, most urgent first, for an encoder
    WRITING      an encoder writes     -> READY     by `publish`; FAILED by `fail` (every waiter gets an error of its
                                                    own); RESERVED again by `retry`, FAILED after too many of them
    READY        leased n times        -> CACHED    when the last lease is released
    CACHED       least recently used   -> evicted   when `reserve` needs the bytes

and of the space of an entry whose writer kept it past its lease:

    QUARANTINED  may still be written  -> free      when that writer is over: `publish`, `fail` or `retry`

The entry itself waits for other space meanwhile, and another encoder.

Space is reserved before the encoder starts, so an encoding never has nowhere to go: reserved bytes are the encoders'
credit, and there is no other. A key in flight is joined, so a picture is encoded once however many requests wait for
it. Ownership: the entry's rows belong to the queue; a lease keeps them alive, and is released by the decoder after the
step that consumed the last row has executed, or when the request ends for any reason. A writer owns the space of its
`Work` from `take` until it says that it is over, which it does exactly once. All methods may be called from any thread.

Liveness. Reservations are granted strictly in order, so a large picture is never starved by small ones. What can
stall is a set of requests that hold READY rows while each waits for space; `unblock` then takes rows back (they are
encoded again later) until the picture that waits longest fits, so each pass advances a request or frees
an entry.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from encoder.item import EncoderItem
from encoder.schedule import Waiting, choose
from kernels.streams import behind, mark

MAX_ATTEMPTS = 3
"""Writers that a picture may cost before its waiters are told: one that kills encoders must not have all of them."""


class EncodingFailed(RuntimeError):
    """No encoder could write a picture's rows."""


class EncoderUnavailable(EncodingFailed):
    """There is no encoder to write them at present."""


class EntryState(enum.Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    WRITING = "writing"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class Work:
    """One picture or clip for an encoder: read `image`, write `rows`."""

    key: bytes
    image: EncoderItem
    rows: torch.Tensor
    ticket: int = 0
    """Of this taking: no two are alike."""
    reserved: Any = None
    """On a GPU the event behind which the rows' memory is theirs: what it held before may still be in use."""

    def space(self) -> torch.Tensor:
        """The rows, to be written by the current stream."""
        return behind(self.reserved, self.rows)


@dataclass(eq=False)
class _Entry:
    key: bytes
    tokens: int
    arrival: float
    state: EntryState = EntryState.WAITING
    image: EncoderItem | None = None
    """The pixels, kept while any lease may still need them encoded (again)."""
    rows: torch.Tensor | None = None
    reserved: Any = None
    """As of `Work`."""
    written: Any = None
    """On a GPU the event behind which the rows have been written."""
    writer: Work | None = None
    expires: float | None = None
    """When the writer's lease ends; None: never."""
    attempts: int = 0
    """Writers that came to nothing."""
    counts: tuple[int, ...] | None = None
    """Rows of each attention sequence, once encoded: what pruning left of a clip's. Kept when rows are taken back."""
    leases: set[Lease] = field(default_factory=set)

    @property
    def urgency(self) -> Waiting:
        """By those who wait for it at present: the earliest deadline, the highest priority."""
        deadlines = [lease.deadline for lease in self.leases if lease.deadline is not None]
        priority = max((lease.priority for lease in self.leases), default=0)
        return Waiting(self.tokens, self.arrival, min(deadlines, default=None), priority)


class Lease:
    """One request's hold on one picture's rows; what the decoder knows as an embedding source."""

    def __init__(self, handoff: Handoff, entry: _Entry, owner: str, priority: int, deadline: float | None) -> None:
        self._handoff = handoff
        self._entry = entry
        self.owner, self.priority, self.deadline = owner, priority, deadline
        self.error: Exception | None = None
        """Why there will be no rows. Of this lease alone: what is raised is written to."""

    @property
    def ready(self) -> bool:
        return self._entry.state is EntryState.READY

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Rows of each attention sequence of the picture or clip; None until it has been encoded once."""
        return self._entry.counts

    def rows(self) -> torch.Tensor:
        """`[tokens, hidden]`, for the current stream to read, which waits for the encoder's; valid until `release`."""
        rows = self._entry.rows
        assert self.ready and rows is not None, "rows() of a picture that is not READY"
        return behind(self._entry.written, rows)

    def release(self) -> None:
        """Gives the hold back. Idempotent."""
        self._handoff._release(self, self._entry)


class Handoff:
    """Bounded in bytes, keyed by content."""

    def __init__(
        self, capacity_bytes: int, hidden: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        on_change: Callable[[], None] = lambda: None, *, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`on_change` is called, outside the lock, whenever an entry may have changed its state. `clock`: seconds, of
        arrivals, deadlines and the writers' leases."""
        self.capacity_bytes = capacity_bytes
        self._row_bytes = hidden * dtype.itemsize
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self.on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._cached: OrderedDict[bytes, _Entry] = OrderedDict()  # READY without leases, least recently used first
        self._quarantined: dict[int, Work] = {}
        self._tickets = count(1)
        self._used = 0  # bytes of entries that hold rows, and of the quarantined
        names = ("hits", "joins", "misses", "evictions", "revocations", "failures", "retries", "expirations", "late")
        self.counters = dict.fromkeys(names, 0)

    @property
    def max_tokens(self) -> int:
        """The largest picture that can ever pass, in image tokens."""
        return self.capacity_bytes // self._row_bytes

    def lease(
        self, key: bytes, image: EncoderItem, owner: str, priority: int = 0, deadline: float | None = None
    ) -> Lease:
        """A hold on the picture's rows: at once where they are cached, shared where they are in flight, else queued for
        the encoder. `deadline`: on the clock of the constructor. Raises ValueError for a picture larger than the whole
        bound, and for a key whose rows are of another number."""
        if image.tokens > self.max_tokens:
            raise ValueError(
                f"the image takes {image.tokens} tokens ({image.tokens * self._row_bytes} bytes of embeddings), above "
                f"the handoff bound of {self.max_tokens} tokens ({self.capacity_bytes} bytes)"
            )
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(key, image.tokens, self._clock(), image=image)
                self._waiting.append(entry)
                self.counters["misses"] += 1
                self._reserve()
            elif entry.tokens != image.tokens:
                raise ValueError(f"the image takes {image.tokens} tokens, and {entry.tokens} under the same key")
            else:
                self.counters["hits" if entry.state is EntryState.READY else "joins"] += 1
                self._cached.pop(key, None)
                entry.image = entry.image or image
            lease = Lease(self, entry, owner, priority, deadline)
            entry.leases.add(lease)
        self.on_change()
        return lease

    # -- for whoever encodes -------------------------------------------------------------------------------------------

    def take(self, max_tokens: int | None = None, *, lease: float | None = None) -> list[Work]:
        """RESERVED pictures for one step of an encoder, about `max_tokens` in all (None: all of them), by the policy
        of `encoder.schedule`; they become WRITING, for at most `lease` seconds (None: for as long as it takes)."""
        taken: list[Work] = []
        with self._lock:
            reserved = [e for e in self._entries.values() if e.state is EntryState.RESERVED]
            if not reserved:
                return []
            step = max_tokens or sum(e.tokens for e in reserved)
            for position in choose([e.urgency for e in reserved], step):
                entry = reserved[position]
                assert entry.image is not None and entry.rows is not None
                entry.state = EntryState.WRITING
                entry.writer = Work(entry.key, entry.image, entry.rows, next(self._tickets), entry.reserved)
                entry.expires = None if lease is None else self._clock() + lease
                taken.append(entry.writer)
        return taken

    def publish(self, works: Sequence[Work], counts: Sequence[tuple[int, ...] | None] = ()) -> None:
        """The writer has written the rows of `works`, on a GPU by what it has asked of the current stream; `counts`: of
        each, the rows of its attention sequences."""
        written = mark(self._device)
        with self._lock:
            for work, rows in zip(works, counts or [None] * len(works), strict=True):
                if (entry := self._end_writing(work)) is not None:
                    # A second encoding keeps the first one's counts: requests have been laid out by them.
                    entry.counts = entry.counts or rows or (entry.tokens,)
                    entry.state, entry.written = EntryState.READY, written
                    if not entry.leases:
                        self._to_cache(entry)
            self._reserve()
        self.on_change()

    def fail(self, work: Work, error: Exception) -> None:
        """The picture cannot be encoded: each waiter gets an error that says what `error` says, the space is free
        again, the next request for it tries again."""
        with self._lock:
            if (entry := self._end_writing(work)) is not None:
                self._fail(entry, error)
            self._reserve()
        self.on_change()

    def retry(self, work: Work, error: Exception) -> None:
        """The writer is over without having written the rows, for a reason of its own: the picture is there to be taken
        again, unless nobody waits for it any more or MAX_ATTEMPTS writers have ended like this."""
        with self._lock:
            if (entry := self._end_writing(work)) is not None:
                self._again(entry, error)
            self._reserve()
        self.on_change()

    def expire(self) -> list[Work]:
        """Takes pictures back from writers whose lease has run out. They may still write: their space is QUARANTINED
        until they say that they are over. Returns what was taken back."""
        with self._lock:
            now = self._clock()
            due = [e for e in self._entries.values() if e.expires is not None and e.expires <= now]
            due.sort(key=lambda entry: entry.arrival, reverse=True)
            taken_back = []
            for entry in due:
                assert entry.writer is not None
                taken_back.append(entry.writer)
                self._quarantined[entry.writer.ticket] = entry.writer
                entry.rows = entry.writer = entry.expires = None
                self.counters["expirations"] += 1
                self._again(entry, EncodingFailed("the encoder did not write the image's rows within its lease"))
            self._reserve()
        if taken_back:
            self.on_change()
        return taken_back

    def next_expiry(self) -> float | None:
        """When the next lease of a writer runs out, on the clock of the constructor."""
        with self._lock:
            return min((e.expires for e in self._entries.values() if e.expires is not None), default=None)

    def seconds_left(self, work: Work) -> float | None:
        """Until the first of those who wait for it stops waiting; None: nobody says."""
        with self._lock:
            entry = self._entries.get(work.key)
            deadline = entry.urgency.deadline if entry is not None else None
        return None if deadline is None else deadline - self._clock()

    def pending_tokens(self) -> int:
        """Image tokens that are being encoded or wait for it."""
        with self._lock:
            return sum(e.tokens for e in self._entries.values() if e.state is not EntryState.READY)

    def unwanted(self) -> list[Work]:
        """What is being written and nobody waits for any more."""
        with self._lock:
            return [e.writer for e in self._entries.values() if e.writer is not None and not e.leases]

    def fail_reserved(self, error: Exception) -> int:
        """There is no encoder: everybody who waits for one is told. Returns the number of pictures."""
        with self._lock:
            pending = (EntryState.RESERVED, EntryState.WAITING)
            doomed = [e for e in self._entries.values() if e.state in pending]
            for entry in doomed:
                self._fail(entry, error)
            self._reserve()
        if doomed:
            self.on_change()
        return len(doomed)

    # -- for whoever decodes -------------------------------------------------------------------------------------------

    def unblock(self) -> bool:
        """Makes room for the picture that waits longest by taking READY rows back from the requests that hold them.

        Call it only while no request can advance: then no held row is one that a request consumes next, and each is
        encoded again later. True if the picture now has its space; False where nothing waits, or an encoding that is
        under way, or the end of a quarantine, will let somebody advance. Rows that are taken back queue up last, so
        within as many calls as pictures wait, one of them is some request's next.
        """
        with self._lock:
            under_way = (EntryState.RESERVED, EntryState.WRITING)
            if not self._waiting or any(e.state in under_way for e in self._entries.values()):
                return False
            wanted = self._waiting[0]
            if wanted.tokens * self._row_bytes > self.capacity_bytes - self._quarantined_bytes():
                return False
            for entry in list(self._entries.values()):
                if self._fits(wanted):
                    break
                if entry.rows is not None and entry.key not in self._cached:
                    self._free_rows(entry)
                    entry.state = EntryState.WAITING
                    self._waiting.append(entry)
                    self.counters["revocations"] += 1
            self._reserve()
            granted = wanted.state is EntryState.RESERVED
        self.on_change()
        return granted

    def flush(self) -> int:
        """Drops all cached rows; returns the bytes freed."""
        with self._lock:
            before = self._used
            for entry in list(self._cached.values()):
                self._evict(entry)
            self._reserve()
            freed = before - self._used
        self.on_change()
        return freed

    def stats(self) -> dict[str, int]:
        """Exact accounting: bytes used, reserved, cached and quarantined, entries by state, and the counters."""
        with self._lock:
            states = dict.fromkeys(EntryState, 0)
            for entry in self._entries.values():
                states[entry.state] += 1
            return {
                "capacity_bytes": self.capacity_bytes,
                "used_bytes": self._used,
                "cached_bytes": self._cached_bytes(),
                "quarantined_bytes": self._quarantined_bytes(),
                "leases": sum(len(e.leases) for e in self._entries.values()),
                "cached": len(self._cached),
                "quarantined": len(self._quarantined),
                **{state.value: count for state, count in states.items() if state is not EntryState.FAILED},
                **self.counters,
            }

    def check_integrity(self, *, idle: bool = False) -> None:
        """used = sum of the entries' rows and of the quarantined <= capacity; queues and states agree; with `idle`,
        nothing is leased, in flight or quarantined, so that used = cached."""
        with self._lock:
            held = sum(e.tokens * self._row_bytes for e in self._entries.values() if e.rows is not None)
            held += self._quarantined_bytes()
            assert held == self._used <= self.capacity_bytes, (held, self._used, self.capacity_bytes)
            for entry in self._entries.values():
                has_rows = entry.state in (EntryState.RESERVED, EntryState.WRITING, EntryState.READY)
                assert has_rows == (entry.rows is not None), entry.state
                assert (entry.writer is not None) == (entry.state is EntryState.WRITING), entry.state
                assert entry.expires is None or entry.writer is not None, "a lease without a writer"
                assert (entry in self._waiting) == (entry.state is EntryState.WAITING), entry.state
                assert (entry.key in self._cached) == (entry.state is EntryState.READY and not entry.leases)
                assert entry.leases or entry.state in (EntryState.READY, EntryState.WRITING), "an entry nobody wants"
            written = {id(e.rows) for e in self._entries.values() if e.rows is not None}
            assert not written & {id(w.rows) for w in self._quarantined.values()}, "quarantined space is in use"
            if idle:
                assert len(self._cached) == len(self._entries), "leases or encodings are left behind"
                assert not self._quarantined, "a writer is not over"

    # -- below: the lock is held (but for _release, which takes it) ----------------------------------------------------

    def _release(self, lease: Lease, entry: _Entry) -> None:
        with self._lock:
            if lease not in entry.leases:
                return
            entry.leases.discard(lease)
            if not entry.leases and entry.state is not EntryState.FAILED:
                if entry.state is EntryState.READY:
                    self._to_cache(entry)
                elif entry.state is not EntryState.WRITING:  # not started: nobody wants it any more
                    self._drop(entry)
                self._reserve()
        self.on_change()

    def _end_writing(self, work: Work) -> _Entry | None:
        """The writer of `work` is over. None if its lease had run out: then its space is free from now on."""
        if self._quarantined.pop(work.ticket, None) is not None:
            self._used -= len(work.rows) * self._row_bytes
            self.counters["late"] += 1
            return None
        entry = self._entries[work.key]
        assert entry.writer is work, f"the end of writing {work.ticket}, which is not under way"
        entry.writer = entry.expires = None
        return entry

    def _again(self, entry: _Entry, error: Exception) -> None:
        """An entry whose writer came to nothing goes back to where its space allows, ahead of those that came later."""
        entry.attempts += 1
        if entry.rows is None:
            entry.state = EntryState.WAITING
            self._waiting.appendleft(entry)
        else:
            entry.state = EntryState.RESERVED
        if not entry.leases:
            self._drop(entry)
        elif entry.attempts >= MAX_ATTEMPTS:
            self._fail(entry, EncodingFailed(f"{entry.attempts} attempts at the image came to nothing: {error}"))
        else:
            self.counters["retries"] += 1

    def _fail(self, entry: _Entry, error: Exception) -> None:
        kinds = (ValueError, EncoderUnavailable)
        kind = next((kind for kind in kinds if isinstance(error, kind)), EncodingFailed)
        for lease in entry.leases:
            lease.error = kind(str(error))
            lease.error.__cause__ = error
        self.counters["failures"] += 1
        self._drop(entry)
        entry.state = EntryState.FAILED

    def _cached_bytes(self) -> int:
        return sum(e.tokens for e in self._cached.values()) * self._row_bytes

    def _quarantined_bytes(self) -> int:
        return sum(len(work.rows) for work in self._quarantined.values()) * self._row_bytes

    def _fits(self, entry: _Entry) -> bool:
        return self._used - self._cached_bytes() + entry.tokens * self._row_bytes <= self.capacity_bytes

    def _reserve(self) -> None:
        """Grants space in order of arrival, evicting cached rows, until the first that does not fit."""
        while self._waiting and self._fits(self._waiting[0]):
            entry = self._waiting.popleft()
            need = entry.tokens * self._row_bytes
            while self._used + need > self.capacity_bytes:
                self._evict(next(iter(self._cached.values())))
            entry.rows = torch.empty(entry.tokens, self._hidden, dtype=self._dtype, device=self._device)
            entry.reserved = mark(self._device)
            self._used += need
            entry.state = EntryState.RESERVED

    def _to_cache(self, entry: _Entry) -> None:
        entry.image = None
        self._cached[entry.key] = entry
        self._cached.move_to_end(entry.key)

    def _evict(self, entry: _Entry) -> None:
        del self._cached[entry.key]
        self.counters["evictions"] += 1
        self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        if entry.state is EntryState.WAITING:
            self._waiting.remove(entry)
        self._free_rows(entry)
        entry.image = None
        del self._entries[entry.key]

    def _free_rows(self, entry: _Entry) -> None:
        if entry.rows is not None:
            entry.rows = None
            self._used -= entry.tokens * self._row_bytes
