"""Decides whether and when a failed call is retried. The waits and the calls are made elsewhere."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from saccade._core.ranges import MAX_SECONDS, check_seconds
from saccade.errors import AlreadyExists, DeadlineExceeded, RateLimited, SaccadeError, Unavailable

_LOG = logging.getLogger("saccade")
_WARN_AT = 4
"""A call is logged once, after this many failures: it may go on failing until its deadline."""

_LONGEST_WAIT = 8.0
_SHORTEST_ATTEMPT = 0.1
"""Seconds. If less time would be left after the wait, there is no further attempt."""


class Deadline:
    """The time limit that all attempts of one call share."""

    def __init__(self, timeout: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        check_seconds("timeout", timeout)
        self._clock = clock
        self._end = None if timeout is None else clock() + timeout

    def remaining(self) -> float | None:
        """Seconds left, never negative; None if there is no limit."""
        return None if self._end is None else max(0.0, self._end - self._clock())

    def left(self) -> float | None:
        """The timeout of the next attempt: at least a millisecond, so that a call whose time is over fails with
        DeadlineExceeded."""
        remaining = self.remaining()
        return None if remaining is None else max(0.001, remaining)


def retry_delay(
    error: SaccadeError,
    attempt: int,
    max_retries: int | None,
    remaining: float | None,
    random_unit: Callable[[], float] = random.random,
) -> float | None:
    """Seconds to wait before the next attempt; None if the call has failed for good.

    The wait doubles from half a second up to 8, with jitter, and is never shorter than the server asked for. If the
    time left is shorter, the wait is half of it. None if too little time would be left for an attempt, so that the
    caller gets the actual error and not DeadlineExceeded.

    Args:
        attempt: number of failed attempts, including this one.
        max_retries: None for any number.
        remaining: seconds until the call has to end; None for no limit but `MAX_SECONDS`.
    """
    if not error.retryable or (max_retries is not None and attempt > max_retries):
        return None
    delay = min(_LONGEST_WAIT, 0.5 * 2 ** min(attempt - 1, 10)) * (0.5 + 0.5 * random_unit())
    asked = max(0.0, error.retry_after or 0.0)
    if error.retry_after is not None:
        delay = asked + delay * 0.2
    remaining = MAX_SECONDS if remaining is None else remaining
    if delay < remaining:
        return delay
    delay = max(asked, remaining / 2)
    return delay if remaining - delay >= _SHORTEST_ATTEMPT else None


class Retries:
    """The failures of one call.

    Args:
        max_retries: the most retries without progress between them; None: as many as the deadline allows.
        registers: the server keeps the call's request id while it works on it. Then ALREADY_EXISTS after a failure
            means that the server has not noticed yet that the failed attempt is over.
    """

    def __init__(
        self,
        max_retries: int | None,
        deadline: Deadline,
        *,
        registers: bool = False,
        random_unit: Callable[[], float] = random.random,
    ) -> None:
        self._max_retries = max_retries
        self._deadline = deadline
        self._registers = registers
        self._random_unit = random_unit
        self._failures = 0
        self._last: SaccadeError | None = None
        self.rejections = 0
        """Failures that a server itself has reported: its queue is full, it is draining, its engine has ended. gRPC
        does not know of them and would choose the same replica again. Lost connections, which gRPC notices itself, are
        not counted."""
        self.lost = False
        """Whether an attempt's answer was lost, so that the server may have done what the call asks for."""

    def progress(self) -> None:
        """The call has received something: failures are counted from 0 again."""
        self._failures = 0

    def delay_after(self, error: SaccadeError, patience: float | None = None) -> float:
        """Seconds to wait before the next attempt. Raises the caller's error if there is to be none.

        Args:
            patience: further limit, in seconds, on the reader's wait; None for no limit.
        """
        judged = seen = error
        if self._registers and self._last is not None and isinstance(error, AlreadyExists):
            judged, seen = Unavailable(error.message, retryable=True, retry_after=error.retry_after), self._last
        elif isinstance(error, DeadlineExceeded) and self._last is not None:
            note = f"the last of {self._failures} failed attempts before it: {self._last}"
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # Python 3.10
                error.message += f" ({note})"
        self._failures += 1
        limits = [limit for limit in (self._deadline.remaining(), patience) if limit is not None]
        delay = retry_delay(
            judged, self._failures, self._max_retries, min(limits, default=None), random_unit=self._random_unit
        )
        if delay is None:
            raise seen from seen.__cause__
        self._last = seen
        self.lost |= not seen.reason
        self.rejections += bool(seen.reason) and not isinstance(seen, RateLimited)
        if self._failures == _WARN_AT:
            level = logging.WARNING if type(seen) is Unavailable else logging.INFO
            _LOG.log(level, "%d attempts have failed and further ones follow: %s", self._failures, seen)
        return delay
