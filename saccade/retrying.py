"""Whether a call is tried again after a failure, and when. Decisions alone: who waits and who calls is elsewhere."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from saccade.errors import AlreadyExists, DeadlineExceeded, SaccadeError, Unavailable
from saccade.transport import Deadline, delay_within

_LOG = logging.getLogger("saccade")
_WARN_AT = 4
"""A call that has failed this often is logged, once: it may go on failing for as long as its deadline allows."""


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

    def progress(self) -> None:
        """The call has brought something: failures count anew."""
        self._failures = 0

    def delay_after(self, error: SaccadeError, patience: float | None = None) -> float:
        """Seconds to wait before the next attempt. Raises the error that the caller is to see if there is to be none.

        Args:
            patience: seconds that the reader is willing to wait at all, beside the call's deadline; None for no limit.
        """
        judged = seen = error
        if self._registers and self._last is not None and isinstance(error, AlreadyExists):
            judged, seen = Unavailable(error.message, retryable=True), self._last
        elif isinstance(error, DeadlineExceeded) and self._last is not None:
            error.add_note(f"the last of {self._failures} failed attempts before it: {self._last}")
        self._failures += 1
        limits = [limit for limit in (self._deadline.remaining(), patience) if limit is not None]
        delay = delay_within(
            judged, self._failures, self._max_retries, min(limits, default=None), random_unit=self._random_unit
        )
        if delay is None:
            raise seen from seen.__cause__
        self._last = seen
        if self._failures == _WARN_AT:
            level = logging.WARNING if type(seen) is Unavailable else logging.INFO
            _LOG.log(level, "%d attempts have failed and further ones follow: %s", self._failures, seen)
        return delay
