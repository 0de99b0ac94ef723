"""Limits on what clients may hold in the server at a time and use per minute. Pure bookkeeping without I/O."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from service.common import errors

Clock = Callable[[], float]


class TokenBucket:
    """A token bucket that is filled with `per_minute` units per minute and holds at most a minute's worth.

    The cost of a call, such as its generated tokens, may be unknown when it begins, so a bucket may be charged below
    zero: later calls then wait until it is positive again. Thread-safe.
    """

    def __init__(self, per_minute: float, clock: Clock = time.monotonic) -> None:
        self._rate, self._capacity, self._clock = per_minute / 60, per_minute, clock
        self._level, self._at = per_minute, clock()
        self._lock = threading.Lock()

    def wait(self, amount: float = 0.0) -> float:
        """Seconds until `amount` is available; 0 if it is now. More than a minute's worth needs a full bucket."""
        with self._lock:
            self._refill()
            missing = min(amount, self._capacity) - self._level
            # Also for a call without cost: it waits until the bucket is positive again.
            return max(0.0, missing / self._rate)

    def charge(self, amount: float) -> None:
        with self._lock:
            self._refill()
            self._level -= amount

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now


class RateLimits:
    """The token buckets of one API key: requests, tokens (prompt and answer) and message bytes, each per minute."""

    KINDS = ("requests", "tokens", "bytes")

    def __init__(self, per_minute: Mapping[str, float], clock: Clock = time.monotonic) -> None:
        """`per_minute`: limits by kind; a kind without one is not limited."""
        self.per_minute = dict(per_minute)
        self._buckets = {kind: TokenBucket(limit, clock) for kind, limit in per_minute.items()}

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return bool(self._buckets)

    def admit(self, kind: str, amount: float) -> None:
        """Takes `amount`. Raises ResourceExhausted with the time to wait if it is not available."""
        bucket = self._buckets.get(kind)
        if bucket is None:
            return
        if (seconds := bucket.wait(amount)) > 0:
            raise errors.ResourceExhausted(
                f"this key has used its {self.per_minute[kind]:g} {kind} per minute; retry in {seconds:.1f} s",
                reason="RATE_LIMITED", quota=f"{kind}_per_minute", retry_after=max(seconds, 0.001),
            )  # fmt: skip
        bucket.charge(amount)

    def charge(self, kind: str, amount: float) -> None:
        """Charges what has been used already, possibly below zero."""
        if (bucket := self._buckets.get(kind)) is not None:
            bucket.charge(amount)


def _too_much(what: str, quota: str) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(what, reason="TENANT_QUEUE_FULL", quota=quota, retry_after=1.0)


@dataclass
class Places:
    """Counts what each tenant holds at a time, with a limit for each tenant with a key. Used on one event loop."""

    limit: int
    what: str
    """What is counted, for messages: `calls` or `requests`."""
    _held: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def hold(self, owner: str) -> Iterator[None]:
        """Counts one more for a tenant until the context ends. `owner`: the tenant's name, empty without a key. Raises
        ResourceExhausted if a tenant with a key has reached the limit."""
        held = self._held.get(owner, 0)
        if owner and held >= self.limit:
            raise _too_much(
                f"this key has {held} {self.what} in the server, which is the limit for one key", f"tenant_{self.what}"
            )
        self._held[owner] = held + 1
        try:
            yield
        finally:
            self._held[owner] -= 1
            if not self._held[owner]:
                del self._held[owner]


@dataclass
class ByteBudget:
    """Counts the message bytes of all calls in progress. Used on one event loop."""

    limit: int
    share: int | None = None
    """The limit of one tenant with a key; None: the limit of all together."""
    used: int = 0
    _owned: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def hold(self, owner: str = "") -> Iterator[Held]:
        """Yields an object that adds bytes to a call's share; they are released at the end of the context. `owner`: the
        tenant's name, empty without a key. Adding raises ResourceExhausted at the tenant's limit, and Unavailable at
        the server's, with `never_retry` if the bytes could never fit."""
        share = self.limit if self.share is None or not owner else min(self.share, self.limit)
        held = Held(self, owner, share)
        try:
            yield held
        finally:
            held.release()


class Held:
    """The bytes of a budget that one call holds."""

    def __init__(self, budget: ByteBudget, owner: str, share: int) -> None:
        self._budget, self._owner, self._share = budget, owner, share
        self._held = 0

    def __call__(self, size: int) -> None:
        """Adds bytes, or releases some if `size` is negative. Raises like `ByteBudget.hold`."""
        budget, owner, share = self._budget, self._owner, self._share
        owned = budget._owned.get(owner, 0)
        if size > 0 and self._held + size > share:
            raise errors.Unavailable(
                f"the call would hold {self._held + size} bytes; at most {share} are allowed", reason="QUEUE_FULL",
                metadata={"limit": str(share), "got": str(self._held + size)}, never_retry=True,
            )  # fmt: skip
        if size > 0 and owner and owned + size > share:
            raise _too_much(
                f"this key's messages in progress hold {owned} bytes; {size} more would exceed the {share} allowed "
                "for one key", "tenant_bytes",
            )  # fmt: skip
        if size > 0 and budget.used + size > budget.limit:
            raise errors.Unavailable(
                f"the messages in progress hold {budget.used} bytes; {size} more would exceed the server's limit of "
                f"{budget.limit}", reason="QUEUE_FULL", metadata={"limit": str(budget.limit)}, retry_after=1.0,
            )  # fmt: skip
        budget.used += size
        self._held += size
        budget._owned[owner] = owned + size

    def release(self) -> None:
        """Releases everything. Idempotent."""
        self(-self._held)
        if not self._budget._owned.get(self._owner):
            self._budget._owned.pop(self._owner, None)
