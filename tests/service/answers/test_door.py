"""The door without a transport: which calls are admitted, the errors of the others, and what a call leaves behind."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from encoder.media_limits import ImageError
from service.answers import door as door_module
from service.answers.door import Door, DoorLimits
from service.common import errors
from service.common.auth import Guard, watch_keys
from service.common.limits import ByteBudget
from service.telemetry.access_log import AccessLog
from service.telemetry.call_context import current_call
from service.telemetry.metrics import Metrics

GENERATE, DRAIN = "/saccade.v1.InferenceService/Generate", "/saccade.v1.AdminService/Drain"
ONE, SLOW = {"authorization": "Bearer sk-one"}, {"x-api-key": "sk-slow"}


class Entrance:
    """A door with two keys, its counters and its log."""

    def __init__(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        keys = "".join(
            f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(f"sk-{name}".encode()).hexdigest()}"\n{more}\n'
            for name, more in (("one", ""), ("slow", "requests_per_minute = 1\nbytes_per_minute = 50"))
        )
        path.write_text(keys)
        self.budget, self.metrics, self._caplog = ByteBudget(1000, 600), Metrics(), caplog
        limits = DoorLimits(stall_timeout=0.05, receive_timeout=5.0, max_message_bytes=400, max_tenant_calls=2)
        self.door = Door(Guard(watch_keys(str(path))), self.budget, self.metrics, AccessLog(), limits)
        caplog.set_level(logging.INFO, "service.access")

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records if record.name == "service.access"]

    def calls(self, code: str) -> float:
        name = f'saccade_calls_total{{code="{code}",method="{GENERATE}"}} '
        found = [line for line in generate_latest(self.metrics.registry).decode().splitlines() if line.startswith(name)]
        return float(found[0].removeprefix(name)) if found else 0.0


@pytest.fixture
def entrance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Entrance:
    return Entrance(tmp_path / "keys.toml", caplog)


def refused(entrance: Entrance, headers: dict[str, Any], method: str = GENERATE) -> errors.StatusError:
    with pytest.raises(errors.StatusError) as caught, entrance.door.admit(method, headers):
        raise AssertionError("was let in")
    return caught.value


def test_a_call_is_counted_logged_and_gives_back_what_it_held(entrance: Entrance) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    with entrance.door.admit(GENERATE, {**ONE, "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}) as call:
        call.received(100)
        call.received(30)
        call.dropped(30)
        current_call().hold_bytes(50)
        call.info.request_id = "mine"
        assert current_call() is call.info and call.info.tenant.name == "one"
        assert entrance.budget.used == 150 and entrance.calls("OK") == 0
    assert entrance.budget.used == 0 and entrance.calls("OK") == 1
    assert current_call() is not call.info
    (line,) = entrance.lines
    for part in ('code="OK"', 'tenant="one"', 'request_id="mine"', f'trace_id="{trace}"', "request_bytes=130"):
        assert part in line
    assert "sk-one" not in line


def test_generations_write_the_line_themselves(entrance: Entrance) -> None:
    with entrance.door.admit(GENERATE, ONE) as call:
        call.info.generations += 1
    assert entrance.lines == [] and entrance.calls("OK") == 1


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-two"}, {"authorization": "Basic sk-one"}])
def test_strangers(entrance: Entrance, headers: dict[str, str]) -> None:
    error = refused(entrance, headers)
    assert isinstance(error, errors.Unauthenticated) and entrance.calls("UNAUTHENTICATED") == 1
    (line,) = entrance.lines
    assert error.request_id and f'request_id="{error.request_id}"' in line and 'reason="UNAUTHENTICATED"' in line


def test_a_scope_that_the_key_has_not(entrance: Entrance) -> None:
    assert isinstance(refused(entrance, ONE, DRAIN), errors.PermissionDenied)
    assert 'tenant="one"' in entrance.lines[0]


def test_requests_and_bytes_per_minute(entrance: Entrance) -> None:
    with pytest.raises(errors.ResourceExhausted) as caught, entrance.door.admit(GENERATE, SLOW) as call:
        call.received(40)
        call.received(40)
    assert (caught.value.reason, caught.value.quota) == ("RATE_LIMITED", "bytes_per_minute")
    assert entrance.budget.used == 0
    error = refused(entrance, SLOW)
    assert (error.reason, error.quota) == ("RATE_LIMITED", "requests_per_minute")
    assert error.retry_after is not None and error.retry_after > 0
    assert all('tenant="slow"' in line for line in entrance.lines) and len(entrance.lines) == 2


def test_bytes_that_are_announced_are_charged_at_once(entrance: Entrance) -> None:
    """Messages have some bytes besides those of the file."""
    with entrance.door.admit(GENERATE, SLOW) as call:
        call.received(10)
        call.info.announce(40)
        for _ in range(4):
            call.received(11)
            call.dropped(11)
        limits = call.info.tenant.limits
    with pytest.raises(errors.ResourceExhausted) as caught:
        limits.admit("bytes", 1)
    assert caught.value.retry_after is not None and 5.9 < caught.value.retry_after <= 6.0  # 4 + 1 of 50 per minute


def test_bytes_that_are_announced_have_the_time_until_all_are_available(entrance: Entrance) -> None:
    with pytest.raises(errors.ResourceExhausted) as caught, entrance.door.admit(GENERATE, SLOW) as call:
        call.received(20)
        call.info.announce(40)
    assert caught.value.retry_after is not None and 11.9 < caught.value.retry_after <= 12.0  # 10 of 50 per minute


def test_calls_of_one_tenant(entrance: Entrance) -> None:
    with entrance.door.admit(GENERATE, ONE), entrance.door.admit(GENERATE, ONE):
        error = refused(entrance, ONE)
        assert (error.reason, error.quota) == ("TENANT_QUEUE_FULL", "tenant_calls")
        with entrance.door.admit(GENERATE, SLOW):
            pass
    with entrance.door.admit(GENERATE, ONE):
        pass


def test_bytes_above_what_a_call_may_hold(entrance: Entrance) -> None:
    with pytest.raises(errors.Unavailable) as caught, entrance.door.admit(GENERATE, ONE) as call:
        call.received(601)
    assert caught.value.reason == "QUEUE_FULL" and caught.value.never_retry and entrance.budget.used == 0


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (ImageError("bad"), "INVALID_ARGUMENT", "IMAGE_DECODE_FAILED"),
        (errors.NotFound("no"), "NOT_FOUND", "NOT_FOUND"),
        (KeyError("secret"), "INTERNAL", "INTERNAL"),
    ],
)
def test_every_exception_is_a_status(entrance: Entrance, error: Exception, code: str, reason: str) -> None:
    with pytest.raises(errors.StatusError) as caught, entrance.door.admit(GENERATE, ONE) as call:
        call.received(100)
        raise error
    assert (caught.value.code.name, caught.value.reason) == (code, reason) and "secret" not in str(caught.value)
    assert entrance.calls(code) == 1 and entrance.budget.used == 0 and len(entrance.lines) == 1


@pytest.mark.parametrize(
    ("left", "code"),
    [(None, "CANCELLED"), (50.0, "CANCELLED"), (0.3, "CANCELLED"), (0.0, "DEADLINE_EXCEEDED")],
)
def test_a_call_that_is_cancelled(entrance: Entrance, left: float | None, code: str) -> None:
    with pytest.raises(asyncio.CancelledError), entrance.door.admit(GENERATE, ONE) as call:
        call.info.expires(left)
        call.received(100)
        raise asyncio.CancelledError
    assert entrance.calls(code) == 1 and entrance.budget.used == 0


def test_a_message_that_is_long_in_coming_counts_as_the_largest(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "QUICK_SECONDS", 0.0)

    async def main() -> None:
        counted, message = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def arrives() -> Any:
            async with asyncio.timeout(5):
                while entrance.budget.used != 400:
                    await asyncio.sleep(0)
            counted.set()
            return await message

        with entrance.door.admit(GENERATE, ONE) as call:
            arriving = asyncio.ensure_future(call.arrival(arrives(), seconds=60.0))
            async with asyncio.timeout(5):
                await counted.wait()
            with pytest.raises(errors.ResourceExhausted) as caught, entrance.door.admit(GENERATE, ONE) as second:
                await second.arrival(asyncio.Event().wait(), seconds=60.0)
            assert caught.value.quota == "tenant_bytes"
            message.set_result(b"x")
            assert await arriving == b"x" and entrance.budget.used == 0

    asyncio.run(main())


def test_a_message_that_does_not_come(entrance: Entrance) -> None:
    async def main() -> None:
        with entrance.door.admit(GENERATE, ONE) as call:
            await call.arrival(asyncio.Event().wait(), seconds=0.01)

    with pytest.raises(errors.DeadlineExceeded) as caught:
        asyncio.run(main())
    assert caught.value.reason == "SLOW_WRITER" and entrance.budget.used == 0


def test_an_answer_that_nobody_reads_is_closed_and_holds_nothing(entrance: Entrance) -> None:
    async def main() -> None:
        closed, written = asyncio.Event(), []

        async def answers() -> AsyncGenerator[str, None]:
            try:
                while True:
                    yield "piece"
            finally:
                closed.set()

        async def write(piece: str) -> None:
            written.append(piece)
            if len(written) == 3:
                async with asyncio.timeout(5):
                    await closed.wait()
                    while entrance.budget.used:
                        await asyncio.sleep(0)

        with entrance.door.admit(GENERATE, ONE) as call:
            call.received(100)
            await call.send(answers(), write)

    with pytest.raises(errors.DeadlineExceeded) as caught:
        asyncio.run(main())
    assert caught.value.reason == "SLOW_READER" and entrance.calls("DEADLINE_EXCEEDED") == 1


@pytest.mark.parametrize("leaves", [False, True], ids=["reads on", "leaves"])
def test_a_client_that_does_something_while_its_answer_is_dropped(entrance: Entrance, leaves: bool) -> None:
    """A generator cannot be closed twice at a time: the call would end as INTERNAL."""

    async def main() -> None:
        closing, may_end, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
        task, ended = asyncio.current_task(), []
        assert task is not None

        async def answers() -> AsyncGenerator[str, None]:
            try:
                yield "piece"
            finally:
                closing.set()
                await may_end.wait()
                ended.append(True)

        async def write(piece: str) -> None:
            await closing.wait()
            loop.call_soon(loop.call_soon, may_end.set)  # after the next step of this task
            if leaves:
                task.cancel()
                await asyncio.sleep(0)

        try:
            with entrance.door.admit(GENERATE, ONE) as call:
                call.received(100)
                await call.send(answers(), write)
        finally:
            assert ended == [True] and entrance.budget.used == 0

    expected: type[BaseException] = asyncio.CancelledError if leaves else errors.DeadlineExceeded
    with pytest.raises(expected):
        asyncio.run(main())
    assert entrance.calls("DEADLINE_EXCEEDED") == 1
