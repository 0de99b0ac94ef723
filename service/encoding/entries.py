"""The objects of the handoff queue: its entries, an encoder's work and a request's lease on rows; and the errors of
encoding. `service.encoding.handoff` describes the states."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from encoder.item import EncoderItem
from encoder.schedule import Waiting
from kernels.streams import behind

MAX_ATTEMPTS = 3
"""Encoders that may fail on an image before its requests get an error: an image that crashes encoders must not crash
all of them."""


class EncodingFailed(RuntimeError):
    """No encoder could write an image's rows."""


class EncoderUnavailable(EncodingFailed):
    """There is no encoder at present."""


def separate(error: Exception) -> Exception:
    """An error of the same kind and message, since raising an exception modifies it."""
    kinds = (ValueError, EncoderUnavailable)
    made = next((kind for kind in kinds if isinstance(error, kind)), EncodingFailed)(str(error))
    made.__cause__ = error
    return made


Run = tuple[int, int, int]
"""(start, first, count): `count` rows of an image, from its row `first`, are the embeddings of the prompt's ids from
index `start`."""


class EntryState(enum.Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    WRITING = "writing"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, eq=False)
class Work:
    """One image or clip for an encoder: read `image`, write `rows`."""

    key: bytes
    image: EncoderItem
    rows: torch.Tensor
    ticket: int = 0
    """Unique number of this attempt; each attempt for an image gets a new one."""
    priority: int = 0
    """The highest priority of the requests that wait for the image when it is taken."""
    reserved: Any = None
    """On a GPU, the event after which the rows' memory may be written, since earlier content may still be read."""
    alone: bool = False
    """Whether it is to be encoded by an encoder that has no other image; see `Handoff.take`."""

    def space(self) -> torch.Tensor:
        """The rows, to be written on the current stream."""
        return behind(self.reserved, self.rows)


@dataclass(eq=False)
class Entry:
    key: bytes
    tokens: int
    arrival: float
    state: EntryState = EntryState.WAITING
    image: EncoderItem | None = None
    """The pixels, kept while a lease may still need them to be encoded (again)."""
    rows: torch.Tensor | None = None
    reserved: Any = None
    """See `Work`."""
    written: Any = None
    """On a GPU, the event after which the rows have been written."""
    writer: Work | None = None
    expires: float | None = None
    """When the encoder's lease ends; None: never."""
    attempts: int = 0
    """Number of failed attempts to encode it."""
    counts: tuple[int, ...] | None = None
    """Rows of each attention sequence, known after encoding (for a clip, after pruning). Kept when rows are evicted."""
    leases: set[Lease] = field(default_factory=set)

    @property
    def last_attempt(self) -> bool:
        """Whether its requests get an error if the next attempt fails too."""
        return self.attempts == MAX_ATTEMPTS - 1

    @property
    def urgency(self) -> Waiting:
        """The earliest deadline and the highest priority of the requests that wait for it at present."""
        deadlines = [lease.deadline for lease in self.leases if lease.deadline is not None]
        priority = max((lease.priority for lease in self.leases), default=0)
        return Waiting(self.tokens, self.arrival, min(deadlines, default=None), priority)


class Lease:
    """One request's right to an image's rows, or to a run of them; an embedding source for the decoder."""

    def __init__(
        self, give_back: Callable[[Lease], None], entry: Entry, priority: int, deadline: float | None,
        run: Run | None = None,
    ) -> None:  # fmt: skip
        """`give_back` is called by `release`. `run`: None for all rows, before their place in the prompt is known."""
        self._give_back = give_back
        self.entry = entry
        self.priority, self.deadline = priority, deadline
        self.start, self._first, self._count = run or (0, 0, entry.tokens)
        """`start`: as in `Run`."""
        self.error: Exception | None = None
        """Why there will be no rows. A separate object per lease, because raising an exception modifies it."""

    @property
    def end(self) -> int:
        """Index of the prompt's id after its rows."""
        return self.start + self._count

    @property
    def complete(self) -> bool:
        """Whether it has the last of the image's rows."""
        return self._first + self._count == self.entry.tokens

    @property
    def key(self) -> bytes:
        """Content key of its rows."""
        whole = self._count == self.entry.tokens
        return self.entry.key if whole else self.entry.key + struct.pack("<qq", self._first, self._count)

    @property
    def ready(self) -> bool:
        return self.entry.state is EntryState.READY

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Rows of each attention sequence of the image or clip; None until it has been encoded once."""
        return self.entry.counts

    def rows(self) -> torch.Tensor:
        """`[end - start, hidden]`, for the current stream, which waits for the encoder's; valid until `release`."""
        rows = self.entry.rows
        assert self.ready and rows is not None, "rows() of an image that is not READY"
        return behind(self.entry.written, rows)[self._first : self._first + self._count]

    def release(self) -> None:
        """Ends the lease. Idempotent."""
        self._give_back(self)
