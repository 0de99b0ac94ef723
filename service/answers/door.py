"""Handling that every call needs, independent of the transport:

    before its message is read   API key -> tenant, scope, request rate, number of calls; a rejected call has no buffer
    while it is read             time is limited; a slow message is counted with the largest size that it may have
    when it has been read        its bytes are counted against the budget and the key's rate
    while it is answered         an answer that is not read in time is dropped and its resources are released
    at the end                   exceptions become `StatusError`s; metrics, one log line, bytes are released

A transport converts its headers and messages, and the `StatusError`s: `service.rpc.interceptor` does so for gRPC. Used
on one event loop.
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
"""Seconds within which nearly every message arrives. After that, a message counts with its largest allowed size."""


@dataclass(frozen=True)
class DoorLimits:
    """Limits on each call, in seconds and bytes, and on the number of calls of one tenant."""

    stall_timeout: float
    """Seconds that a message of a stream may wait to be read, and that an upload may wait for its next message."""
    receive_timeout: float
    """Seconds that receiving the message of a call may take."""
    max_message_bytes: int
    max_tenant_calls: int
    max_ids: int = MIN_IDS
    """Largest number of elements in one list of a message."""


class Door:
    """Admits calls of all transports."""

    def __init__(
        self, guard: Guard, budget: ByteBudget, metrics: Metrics, access: AccessLog, limits: DoorLimits
    ) -> None:
        self._guard, self._budget, self._metrics, self._access = guard, budget, metrics, access
        self.limits = limits
        self._places = Places(limits.max_tenant_calls, "calls")

    @contextlib.contextmanager
    def admit(self, method: str, headers: Mapping[str, str | bytes]) -> Iterator[Admitted]:
        """Handles one call, from its headers to its end; the context's body answers it. `method`:
        `/package.Service/Method`; `headers`: with lower-case names.

        Raises StatusError if the call is rejected and for every exception of the body; CancelledError is passed on. The
        call has then been counted and logged, and holds no resources.
        """
        info = CallInfo(method, trace=from_metadata(headers), given_id=str(headers.get("x-request-id", ""))[:128])
        before = set_current_call(info)
        try:
            info.tenant = self._guard.identify(headers)
            self._guard.admit(method, info.tenant)
            with self._places.hold(info.tenant.name), self._budget.hold(info.tenant.name) as held:
                info.hold_bytes = held
                yield Admitted(info, held, self.limits, self._budget.limit)
        except (asyncio.CancelledError, GeneratorExit):
            info.cancel()
            raise
        except errors.StatusError as error:
            note(info, error)
            raise
        except Exception as error:
            raise note(info, errors.to_status(error), error) from error
        finally:
            set_current_call(before)
            self._metrics.call(info.method, info.code, info.request_bytes)
            if info.generations == 0:
                self._access.write(info, **info.tokens, seconds=time.monotonic() - info.started)


@dataclass
class Admitted:
    """An admitted call and the resources that it holds."""

    info: CallInfo
    held: Held
    """The call's share of the byte budget."""
    limits: DoorLimits
    budget_bytes: int

    async def arrival(self, message: Awaitable[T], *, seconds: float) -> T:
        """Waits for a message. Raises DeadlineExceeded after `seconds`, and the error of `held` if the budget has no
        space for a message that arrives slowly."""
        size, refusal = 0, None
        loop = asyncio.get_running_loop()

        def count() -> None:
            nonlocal size, refusal
            largest = min(self.limits.max_message_bytes, self.budget_bytes)
            try:
                self.held(largest)
                size = largest
                bound.reschedule(began + seconds)
            except errors.StatusError as error:
                refusal = error
                bound.reschedule(0.0)

        # One timer is enough for a message that arrives quickly.
        began = loop.time()
        timer = loop.call_later(QUICK_SECONDS, count) if seconds > QUICK_SECONDS else None
        try:
            async with asyncio.timeout(None if timer else seconds) as bound:
                return await message
        except TimeoutError:
            raise refusal or errors.DeadlineExceeded(
                f"a message did not arrive within {seconds:g} s", reason="SLOW_WRITER"
            ) from None
        finally:
            if timer is not None:
                timer.cancel()
            if size:
                self.held(-size)

    def received(self, size: int) -> None:
        """Counts a received message, which is held until the call ends. Raises StatusError if the budget is full or the
        key's bytes per minute are exhausted."""
        self.info.request_bytes += size
        self.held(size)
        self.info.charge_message(size)

    def dropped(self, size: int) -> None:
        """Releases the bytes of a message that is no longer held, or that is counted elsewhere."""
        self.held(-size)

    async def send(self, answers: AsyncGenerator[T, None], write: Callable[[T], Awaitable[Any]]) -> None:
        """Writes each of `answers` and closes them. If one is not read for `stall_timeout` seconds, releases all
        resources and raises DeadlineExceeded."""
        timeout = self.limits.stall_timeout
        watch = _Stall(answers, timeout, self.held, self.info)
        try:
            async for answer in answers:
                with watch:
                    await write(answer)
                if self.info.dropped is not None:
                    raise self.info.dropped
        finally:
            await watch.close()


class _Stall:
    """Watches the writes of one stream. If the client does not read for too long, the generator of the answers is
    closed, which releases the request's resources. Only the message that is being written stays, because a status
    cannot be sent before it."""

    def __init__(self, answers: AsyncGenerator[Any, None], timeout: float, held: Held, info: CallInfo) -> None:
        """`held`: the call's share of the byte budget, released as soon as the generator is closed."""
        self._answers, self._timeout, self._held, self._info = answers, timeout, held, info
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._began = self._loop.time()
        if self._timer is None:  # one timer for many writes, which take microseconds each
            self._timer = self._loop.call_at(self._began + self._timeout, self._check)

    def __exit__(self, *_: object) -> None:
        self._began = None

    async def close(self) -> None:
        """Closes the generator, so that the engine learns of the call's end at once and not when the garbage collector
        runs. If that has begun, waits for its end: a generator cannot be closed a second time meanwhile."""
        if self._timer is not None:
            self._timer.cancel()
        if self._closing is None:
            await self._answers.aclose()
        else:
            await asyncio.wait({self._closing})

    def _check(self) -> None:
        self._timer = None
        if self._began is None:  # the next write starts the timer again
            return
        if (end := self._began + self._timeout) > self._loop.time():
            self._timer = self._loop.call_at(end, self._check)
            return
        log.warning("a client has not read its stream for %g s: the request is dropped", self._timeout)
        self._info.dropped = errors.DeadlineExceeded(
            f"the client did not read a message of the answer for {self._timeout:g} s", reason="SLOW_READER"
        )
        self._closing = self._loop.create_task(self._drop())

    async def _drop(self) -> None:
        try:
            await self._answers.aclose()
        finally:
            self._held.release()


def note(info: CallInfo, status: errors.StatusError, cause: Exception | None = None) -> errors.StatusError:
    """Records the status with which the call ends; returns it."""
    info.fail(status)
    # With this id, a client's report can be matched with the log.
    status.request_id = info.request_id = info.request_id or info.given_id or secrets.token_hex(8)
    if isinstance(status, errors.Internal):
        log.error("%s failed, request %r", info.method, info.request_id, exc_info=cause or status)
    return status
