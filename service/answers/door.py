"""What happens around every call, whatever transport brings it:

    before its message is read   API key -> tenant, scope, request rate, a place among its calls; a refusal costs the
                                 server no buffer
    while it is read             bounded in time; one that takes long is counted with the largest size it may have
    with the message             bytes counted against the budget and the key's rate
    while it is answered         an answer that nobody reads is dropped, and what it held is given back
    at the end                   every exception becomes a `StatusError`; metrics, one line in the log, bytes given back

A transport turns its headers, messages and the `StatusError` into its own: `service.rpc.interceptor` does so for gRPC.
Used on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from service.answers.weigh import MIN_IDS
from service.common import errors
from service.common.auth import Guard
from service.common.limits import ByteBudget, Held, Places
from service.telemetry.access_log import AccessLog
from service.telemetry.call_context import CallInfo, set_current_call
from service.telemetry.metrics import Metrics
from service.telemetry.tracing import from_metadata

log = logging.getLogger(__name__)

T = TypeVar("T")

QUICK_SECONDS = 2.0
"""Seconds in which nearly every message arrives. After that, a message counts with the largest size that it may
have."""


@dataclass(frozen=True)
class DoorLimits:
    """Limits on each call, in seconds and bytes, and on the number of calls of one tenant."""

    stall_timeout: float
    """Seconds that one message of a stream may wait for its reader, and that an upload may wait for the next
    message."""
    receive_timeout: float
    """Seconds that receiving the message of a call may take."""
    max_message_bytes: int
    max_tenant_calls: int
    max_ids: int = MIN_IDS
    """Numbers in one list of a message."""


class Door:
    """Admits calls, from all transports."""

    def __init__(
        self, guard: Guard, budget: ByteBudget, metrics: Metrics, access: AccessLog, limits: DoorLimits
    ) -> None:
        self._guard, self._budget, self._metrics, self._access = guard, budget, metrics, access
        self.limits = limits
        self._places = Places(limits.max_tenant_calls, "calls")

    @contextlib.contextmanager
    def admit(self, method: str, headers: Mapping[str, str | bytes]) -> Iterator[Admitted]:
        """Handles one call, from its headers to its end; the body answers it. `method`: `/package.Service/Method`;
        `headers`: with names in lower case.

        Raises StatusError where the call is refused and for every exception of the body, and CancelledError unchanged.
        By then the call has been counted and logged, and holds nothing.
        """
        info = CallInfo(method, trace=from_metadata(headers))
        before = set_current_call(info)
        try:
            info.tenant = self._guard.admit(method, headers)
            with self._places.hold(info.tenant.name), self._budget.hold(info.tenant.name) as held:
                info.hold_bytes = held
                yield Admitted(info, held, self.limits, self._budget.limit)
        except (asyncio.CancelledError, GeneratorExit):
            info.code = errors.Code.CANCELLED.name
            raise
        except errors.StatusError as error:
            _note(info, error)
            raise
        except Exception as error:
            raise _note(info, errors.to_status(error), error) from error
        finally:
            set_current_call(before)
            self._metrics.call(info.method, info.code, info.request_bytes)
            if info.generations == 0:
                self._access.write(info, seconds=time.monotonic() - info.started)

    @contextlib.contextmanager
    def probed(self) -> Iterator[Admitted]:
        """The message of a caller that needs no key, such as a health probe: only its size and time are limited, and it
        is neither counted nor logged. Raises StatusError."""
        with self._budget.hold() as held:
            yield Admitted(CallInfo(), held, self.limits, self._budget.limit)


@dataclass
class Admitted:
    """A call that has been admitted, and what it holds."""

    info: CallInfo
    held: Held
    """The call's share of the byte budget."""
    limits: DoorLimits
    budget_bytes: int

    async def arrival(self, message: Awaitable[T], *, seconds: float) -> T:
        """Waits for a message. Raises DeadlineExceeded after `seconds`, and what `held` raises where the budget has no
        room for a message that arrives slowly."""
        size, refusal = 0, None

        def count() -> None:
            nonlocal size, refusal
            largest = min(self.limits.max_message_bytes, self.budget_bytes)
            try:
                self.held(largest)
                size = largest
            except errors.StatusError as error:
                refusal = error
                bound.reschedule(0.0)

        timer = asyncio.get_running_loop().call_later(QUICK_SECONDS, count)
        try:
            async with asyncio.timeout(seconds) as bound:
                return await message
        except TimeoutError:
            raise refusal or errors.DeadlineExceeded(
                f"a message did not arrive within {seconds:g} s", reason="SLOW_WRITER"
            ) from None
        finally:
            timer.cancel()
            self.held(-size)

    def received(self, size: int) -> None:
        """Counts a received message, which is held until the call ends. Raises StatusError where the budget has no
        room, or the key's bytes per minute are used up."""
        self.info.request_bytes += size
        self.held(size)
        self.info.tenant.limits.admit("bytes", size)

    def dropped(self, size: int) -> None:
        """The message is no longer held, or is counted elsewhere."""
        self.held(-size)

    async def send(self, answers: AsyncGenerator[T, None], write: Callable[[T], Awaitable[Any]]) -> None:
        """Writes each of `answers` and closes them. Raises DeadlineExceeded where one is not read for `stall_timeout`
        seconds; the call then holds nothing any more."""
        timeout = self.limits.stall_timeout
        # aclosing: the engine must be told of a call's end at once, not when the garbage collector runs.
        async with contextlib.aclosing(answers):
            watch = _Stall(answers, timeout, self.held)
            async for answer in answers:
                with watch:
                    await write(answer)
                if watch.stalled:
                    raise errors.DeadlineExceeded(
                        f"a message of the answer was not read for {timeout:g} s", reason="SLOW_READER"
                    )


class _Stall:
    """Watches the writes of one stream. Where a client does not read for too long, the generator of its answers is
    closed, so that it holds nothing any more; the message that is being written stays, because no status can overtake
    it."""

    def __init__(self, answers: AsyncGenerator[Any, None], timeout: float, held: Held) -> None:
        """`held`: the call's share of the budget, given back as soon as its work is dropped."""
        self._answers, self._timeout, self._held = answers, timeout, held
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def stalled(self) -> bool:
        return self._closing is not None

    def __enter__(self) -> None:
        self._timer = self._loop.call_later(self._timeout, self._close)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _close(self) -> None:
        log.warning("a stream's reader has not read for %g s: its work is dropped", self._timeout)
        self._closing = self._loop.create_task(self._drop())

    async def _drop(self) -> None:
        try:
            await self._answers.aclose()
        finally:
            self._held.release()


def _note(info: CallInfo, status: errors.StatusError, cause: Exception | None = None) -> errors.StatusError:
    """Records the status that the call ends with; returns it."""
    info.fail(status)
    # The id by which a client's complaint and the log can be matched.
    status.request_id = info.request_id = info.request_id or secrets.token_hex(8)
    if isinstance(status, errors.Internal):
        log.error("%s failed, request %s", info.method, info.request_id, exc_info=cause or status)
    return status
