"""Bounds on what clients may have in the server at a time, and per minute. Pure bookkeeping, no clock of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from service import errors

Clock = Callable[[], float]


class TokenBucket:
    """`per_minute` units a minute, saved up for at most one minute.

    What a call will cost is not always known when it begins (generated tokens are not), so a bucket may be charged
    below zero: the debt keeps later calls waiting. Thread-safe.
    """

    def __init__(self, per_minute: float, clock: Clock = time.monotonic) -> None:
        self._rate, self._capacity, self._clock = per_minute / 60, per_minute, clock
        self._level, self._at = per_minute, clock()
        self._lock = threading.Lock()

    def wait(self, amount: float = 0.0) -> float:
        """Seconds until `amount` can be had; 0 if it can now. More than a minute's worth is had from a full bucket."""
        with self._lock:
            self._refill()
            missing = min(amount, self._capacity) - self._level
            # a call that costs nothing yet still has to wait until a debt is paid
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
    """The buckets of one API key: requests, tokens (prompt and answer) and message bytes, each per minute."""

    KINDS = ("requests", "tokens", "bytes")

    def __init__(self, per_minute: Mapping[str, float], clock: Clock = time.monotonic) -> None:
        """`per_minute`: limits by kind; a kind without one is not limited."""
        self._buckets = {kind: TokenBucket(limit, clock) for kind, limit in per_minute.items()}

    @property
    def limited(self) -> bool:
        """Whether anything is."""
        return bool(self._buckets)

    def admit(self, kind: str, amount: float) -> None:
        """Takes `amount`. Raises ResourceExhausted with the time to wait."""
        bucket = self._buckets.get(kind)
        if bucket is None:
            return
        if (seconds := bucket.wait(amount)) > 0:
            raise errors.ResourceExhausted(
                f"this key's {kind} per minute are used up; there is room again in {seconds:.1f} s",
                reason="RATE_LIMITED", quota=f"{kind}_per_minute", retry_after=max(seconds, 0.001),
            )  # fmt: skip
        bucket.charge(amount)

    def charge(self, kind: str, amount: float) -> None:
        """Takes what has been used already, into debt if need be."""
        if (bucket := self._buckets.get(kind)) is not None:
            bucket.charge(amount)


@dataclass
class ByteBudget:
    """Message bytes of all calls in progress. Used on one event loop."""

    limit: int
    used: int = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yields what adds bytes to this call's share; they are given back at the end. Adding raises Unavailable."""
        held = 0

        def add(size: int) -> None:
            nonlocal held
            if self.used + size > self.limit:
                raise errors.Unavailable(
                    f"the messages in progress hold {self.used} bytes; {size} more would pass the server's "
                    f"{self.limit}", reason="QUEUE_FULL", metadata={"limit": str(self.limit)}, retry_after=1.0,
                )  # fmt: skip
            self.used += size
            held += size

        try:
            yield add
        finally:
            self.used -= held
