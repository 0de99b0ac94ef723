"""Information about the running call, kept in a context variable so that it need not be passed as an argument."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from service.common import errors
from service.common.auth import Tenant
from service.telemetry.tracing import TraceContext

ROUNDING, TRANSIT = 0.01, 0.05
"""A client's timer ends before the server's: gRPC rounds the time that it sends up, by at most this part, and it counts
from when the server reads it, which may be so many seconds later."""


@dataclass
class CallInfo:
    """One call, from its metadata to its end."""

    method: str = ""
    tenant: Tenant = field(default_factory=Tenant)
    trace: TraceContext | None = None
    started: float = field(default_factory=time.monotonic)
    request_bytes: int = 0
    request_id: str = ""
    given_id: str = ""
    """The header `x-request-id`, which names a call whose message has no request id."""
    code: str = "OK"
    reason: str = ""
    generations: int = 0
    """Generations of this call that have written their own line to the access log."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Counts for the line of a call without generations in the access log."""
    accepted: bool = False
    """Part of an HTTP request that has been accepted, so that a drain does not reject this call."""
    late: float = math.inf
    """From when on a cancellation is taken for the end of the client's time, by `time.monotonic`."""
    dropped: errors.StatusError | None = None
    """Why the server has given up the answer; its reader does not know yet."""
    hold_bytes: Callable[[int], None] = lambda size: None
    """Counts bytes that the call holds until its end in addition to its messages. Raises Unavailable if the server's
    limit would be exceeded."""

    announced_bytes: int | None = None
    """Bytes of further messages for which the key's rate has been charged; None: nothing was announced."""

    def announce(self, size: int) -> None:
        """Charges the key's rate for a file that follows in several messages. If each message were charged by itself,
        the rate could end a file at any of them, and each repetition would use up what the next one needs. Raises
        ResourceExhausted with the time until all of it may be sent."""
        self.tenant.limits.admit("bytes", size)
        self.announced_bytes = size

    def charge_message(self, size: int) -> None:
        """Charges the key's rate for a message, as far as it was not announced. Raises ResourceExhausted for a call
        that has announced nothing."""
        if self.announced_bytes is None:
            self.tenant.limits.admit("bytes", size)
            return
        announced = min(size, self.announced_bytes)
        self.announced_bytes -= announced
        self.tenant.limits.charge("bytes", size - announced)  # what messages have around the bytes of a file

    def fail(self, error: errors.StatusError) -> None:
        self.code, self.reason = error.code.name, error.reason

    def expires(self, seconds: float | None) -> None:
        """`seconds`: until the client's deadline, as gRPC tells it; None: the client has none."""
        if seconds is not None:
            self.late = time.monotonic() + seconds * (1 - ROUNDING) - TRANSIT

    def cancel(self) -> None:
        """Records that the call has been cancelled, or its answer closed. If the client's time is over, that is the
        reason: its library or gRPC has cancelled the call before a timer here ended it."""
        if self.dropped is not None:
            self.fail(self.dropped)
        elif time.monotonic() < self.late:
            self.code = errors.Code.CANCELLED.name
        else:
            self.fail(errors.DeadlineExceeded("the deadline has passed"))


_current: ContextVar[CallInfo | None] = ContextVar("saccade_call", default=None)


def current_call() -> CallInfo:
    """The call for which this code runs; an empty one outside of any call."""
    return _current.get() or CallInfo()


def set_current_call(info: CallInfo | None) -> CallInfo | None:
    """Replaces the call for which this code runs. Returns the previous one, to be set again at the end of this one."""
    before = _current.get()
    _current.set(info)
    return before
