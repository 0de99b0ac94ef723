"""The embedding handoff queue between encoder and decoder, which is also the embedding cache.

Entry states, and who moves them:

    (waiting)  no space yet          -> RESERVED  by `reserve`, in order of arrival
    RESERVED   space, no writer      -> WRITING   by `take`, most urgent first, for the encoder
    WRITING    the encoder writes    -> READY     by `publish`; FAILED by `fail` (every waiter gets the error)
    READY      leased n times        -> CACHED    when the last lease is released
    CACHED     least recently used   -> evicted   when `reserve` needs the bytes

Space is reserved before the encoder starts, so an encoding never has nowhere to go. A key in flight is joined, so a
picture is encoded once however many requests wait for it. Ownership: the entry's rows belong to the queue; a lease
keeps them alive, and is released by the decoder after the step that consumed the last row has executed, or when the
request ends for any reason. All methods may be called from any thread.

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

import torch

from encoder.job import EncoderItem
from encoder.schedule import Waiting, choose


class EntryState(enum.Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    WRITING = "writing"
    READY = "ready"
    FAILED = "failed"


@dataclass(eq=False)
class _Entry:
    key: bytes
    tokens: int
    arrival: float = field(default_factory=time.monotonic)
    priority: int = 0
    """The largest of those who wait for it."""
    state: EntryState = EntryState.WAITING
    image: EncoderItem | None = None
    """The pixels, kept while any lease may still need them encoded (again)."""
    rows: torch.Tensor | None = None
    counts: tuple[int, ...] | None = None
    """Rows of each attention sequence, once encoded: what pruning left of a clip's. Kept when rows are taken back."""
    error: Exception | None = None
    leases: set[Lease] = field(default_factory=set)


class Lease:
    """One request's hold on one picture's rows; what the decoder knows as an embedding source."""

    def __init__(self, handoff: Handoff, entry: _Entry, owner: str) -> None:
        self._handoff = handoff
        self._entry = entry
        self.owner = owner

    @property
    def ready(self) -> bool:
        return self._entry.state is EntryState.READY

    @property
    def error(self) -> Exception | None:
        return self._entry.error

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Rows of each attention sequence of the picture or clip; None until it has been encoded once."""
        return self._entry.counts

    def rows(self) -> torch.Tensor:
        """`[tokens, hidden]`; valid until `release`."""
        rows = self._entry.rows
        assert self.ready and rows is not None, "rows() of a picture that is not READY"
        return rows

    def release(self) -> None:
        """Gives the hold back. Idempotent."""
        self._handoff._release(self, self._entry)


@dataclass(frozen=True)
class Work:
    """One picture or clip for the encoder: read `image`, write `rows`."""

    key: bytes
    image: EncoderItem
    rows: torch.Tensor


class Handoff:
    """Bounded in bytes, keyed by content."""

    def __init__(
        self, capacity_bytes: int, hidden: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        on_change: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`on_change` is called, outside the lock, whenever an entry became RESERVED, READY or FAILED."""
        self.capacity_bytes = capacity_bytes
        self._row_bytes = hidden * dtype.itemsize
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self.on_change = on_change
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._cached: OrderedDict[bytes, _Entry] = OrderedDict()  # READY without leases, least recently used first
        self._used = 0  # bytes of entries that hold rows
        self.counters = {"hits": 0, "joins": 0, "misses": 0, "evictions": 0, "revocations": 0, "failures": 0}

    @property
    def max_tokens(self) -> int:
        """The largest picture that can ever pass, in image tokens."""
        return self.capacity_bytes // self._row_bytes

    def lease(self, key: bytes, image: EncoderItem, owner: str, priority: int = 0) -> Lease:
        """A hold on the picture's rows: at once where they are cached, shared where they are in flight, else queued for
        the encoder. Raises ValueError for a picture larger than the whole bound."""
        if image.tokens > self.max_tokens:
            raise ValueError(
                f"the image takes {image.tokens} tokens ({image.tokens * self._row_bytes} bytes of embeddings), above "
                f"the handoff bound of {self.max_tokens} tokens ({self.capacity_bytes} bytes)"
            )
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(key, image.tokens, image=image)
                self._waiting.append(entry)
                self.counters["misses"] += 1
                self._reserve()
            else:
                self.counters["hits" if entry.state is EntryState.READY else "joins"] += 1
                self._cached.pop(key, None)
                entry.image = entry.image or image
            entry.priority = max(entry.priority, priority)
            lease = Lease(self, entry, owner)
            entry.leases.add(lease)
        self.on_change()
        return lease

    def take(self, max_tokens: int | None = None) -> list[Work]:
        """RESERVED pictures for one step of the encoder, about `max_tokens` in all (None: all of them), by the policy
        of `encoder.schedule`; they become WRITING."""
        taken: list[Work] = []
        with self._lock:
            reserved = [e for e in self._entries.values() if e.state is EntryState.RESERVED]
            if not reserved:
                return []
            step = max_tokens or sum(e.tokens for e in reserved)
            for position in choose([Waiting(e.tokens, e.arrival, None, e.priority) for e in reserved], step):
                entry = reserved[position]
                assert entry.image is not None and entry.rows is not None
                entry.state = EntryState.WRITING
                taken.append(Work(entry.key, entry.image, entry.rows))
        return taken

    def publish(self, keys: Sequence[bytes], counts: Sequence[tuple[int, ...] | None] = ()) -> None:
        """The encoder has written the rows of `keys`; `counts`: of each, the rows of its attention sequences."""
        with self._lock:
            for key, rows in zip(keys, counts or [None] * len(keys), strict=True):
                entry = self._entries[key]
                # A second encoding keeps the first one's counts: requests have been laid out by them.
                entry.counts = entry.counts or rows or (entry.tokens,)
                assert entry.state is EntryState.WRITING, f"published while {entry.state}"
                entry.state = EntryState.READY
                if not entry.leases:
                    self._to_cache(entry)
        self.on_change()

    def fail(self, key: bytes, error: Exception) -> None:
        """The encoding of `key` failed: each waiter sees `error`, the space is free again, the next request retries."""
        with self._lock:
            entry = self._entries[key]
            assert entry.state is EntryState.WRITING, f"failed while {entry.state}"
            self.counters["failures"] += 1
            entry.state, entry.error = EntryState.FAILED, error
            self._drop(entry)
            self._reserve()
        self.on_change()

    def unblock(self) -> bool:
        """Makes room for the picture that waits longest by taking READY rows back from the requests that hold them.

        Call it only while no request can advance: then no held row is one that a request consumes next, and each is
        encoded again later. True if the picture now has its space; False where nothing waits, or an encoding that is
        under way will let somebody advance. Rows that are taken back queue up last, so within as many calls as pictures
        wait, one of them is some request's next.
        """
        with self._lock:
            under_way = (EntryState.RESERVED, EntryState.WRITING)
            if not self._waiting or any(e.state in under_way for e in self._entries.values()):
                return False
            wanted = self._waiting[0]
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
        """Exact accounting: bytes used, reserved and cached, entries by state, and the counters."""
        with self._lock:
            states = dict.fromkeys(EntryState, 0)
            for entry in self._entries.values():
                states[entry.state] += 1
            return {
                "capacity_bytes": self.capacity_bytes,
                "used_bytes": self._used,
                "cached_bytes": sum(e.tokens for e in self._cached.values()) * self._row_bytes,
                "leases": sum(len(e.leases) for e in self._entries.values()),
                "cached": len(self._cached),
                **{state.value: count for state, count in states.items() if state is not EntryState.FAILED},
                **self.counters,
            }

    def check_integrity(self, *, idle: bool = False) -> None:
        """used = sum of the entries' rows <= capacity; queues and states agree; with `idle`, nothing is leased or in
        flight, so that used = cached."""
        with self._lock:
            held = sum(e.tokens * self._row_bytes for e in self._entries.values() if e.rows is not None)
            assert held == self._used <= self.capacity_bytes, (held, self._used, self.capacity_bytes)
            for entry in self._entries.values():
                has_rows = entry.state in (EntryState.RESERVED, EntryState.WRITING, EntryState.READY)
                assert has_rows == (entry.rows is not None), entry.state
                assert (entry in self._waiting) == (entry.state is EntryState.WAITING), entry.state
                assert (entry.key in self._cached) == (entry.state is EntryState.READY and not entry.leases)
                assert entry.leases or entry.state in (EntryState.READY, EntryState.WRITING), "an entry nobody wants"
            if idle:
                assert len(self._cached) == len(self._entries), "leases or encodings are left behind"

    # -- below: the lock is held --

    def _release(self, lease: Lease, entry: _Entry) -> None:
        with self._lock:
            if lease not in entry.leases:
                return
            entry.leases.discard(lease)
            if entry.leases or entry.state in (EntryState.FAILED, EntryState.WRITING):
                return
            if entry.state is EntryState.READY:
                self._to_cache(entry)
            else:  # not started: nobody wants it any more
                self._drop(entry)
            self._reserve()
        self.on_change()

    def _fits(self, entry: _Entry) -> bool:
        cached = sum(e.tokens for e in self._cached.values()) * self._row_bytes
        return self._used - cached + entry.tokens * self._row_bytes <= self.capacity_bytes

    def _reserve(self) -> None:
        """Grants space in order of arrival, evicting cached rows, until the first that does not fit."""
        while self._waiting and self._fits(self._waiting[0]):
            entry = self._waiting.popleft()
            need = entry.tokens * self._row_bytes
            while self._used + need > self.capacity_bytes:
                self._evict(next(iter(self._cached.values())))
            entry.rows = torch.empty(entry.tokens, self._hidden, dtype=self._dtype, device=self._device)
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
