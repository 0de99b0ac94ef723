"""Signals, and how a server stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from service.common.config import ServerOptions
from service.common.errors import EngineDied
from service.common.helper_process import STOP_SIGNALS, announce, ignore_stop_signals
from service.engine.engine_client import Loading
from service.servers.exposure import address_of
from service.servers.http_process import LAST_SECONDS, HttpProcess

T = TypeVar("T")
log = logging.getLogger(__name__)


class Stoppable(Protocol):
    """A server that listens on a port."""

    port: int

    async def stop(self, grace: float | None = None) -> None: ...


def stop_signals(*numbers: signal.Signals) -> asyncio.Event:
    """An event that these signals set, by default SIGTERM and SIGINT."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()

    def told(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(stopping.set)

    for number in numbers or STOP_SIGNALS:
        # Not the loop's own handlers: when it is closed, the signals would again end the process.
        signal.signal(number, told)
    return stopping


def run_to_end(serve: Coroutine[Any, Any, int]) -> int:
    """Runs a server. Further signals cannot change the exit code, which is the result."""
    code = asyncio.run(serve)
    ignore_stop_signals()
    return code


async def unless_stopped(load: Callable[[Loading], T], stopping: asyncio.Event) -> T | None:
    """Runs `load`, which loads a model, in a thread. Returns what it returns, or None if a signal stopped it; raises
    what it raises."""
    loop, loading = asyncio.get_running_loop(), Loading()

    async def end() -> None:
        await stopping.wait()
        log.info("stopping before the model is loaded")
        loading.end()

    ending = asyncio.create_task(end())
    try:
        return await loop.run_in_executor(None, load, loading)
    except EngineDied:
        if stopping.is_set():
            return None
        raise
    finally:
        ending.cancel()


async def started(starting: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Waits until a server has started. False if a signal has come first; then the start is cancelled, and the server
    has to be stopped. Raises what `starting` raises."""
    start, stop = asyncio.create_task(starting), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
    if start.done():
        start.result()
        return True
    log.info("stopping before the server is ready")
    start.cancel()
    await asyncio.wait({start})
    return False


async def until_stopped(
    server: Stoppable, stopping: asyncio.Event, options: ServerOptions, http: HttpProcess | None = None
) -> None:
    """Prints the ready line, and one for the HTTP server if there is one; on a signal, stops both. Raises ConfigError
    if the HTTP server cannot start."""
    address = address_of(options, server.port)
    announce(f"saccade ready on {address}")
    if http is None:
        await stop_when_told(server, stopping, options.grace)
        return
    try:
        serves = await started(http.started(), stopping)
    except BaseException:
        await server.stop(grace=0)
        raise
    if serves:
        http.tell(address)
        announce(f"saccade http ready on {http.url}")
    await stop_when_told(_WithHttp(server, http, options.grace), stopping, options.grace)


class _WithHttp:
    """A server with its HTTP server, which stops last: it passes on the refusals of new calls, and sends the answers
    that it has received meanwhile."""

    def __init__(self, server: Stoppable, http: HttpProcess, grace: float) -> None:
        self._server, self._http, self._grace = server, http, grace
        self.port = server.port

    async def stop(self, grace: float | None = None) -> None:
        """Stops both; the HTTP server gets what the other one leaves of `grace`, but at least `LAST_SECONDS` unless
        `grace` is 0."""
        loop, seconds = asyncio.get_running_loop(), self._grace if grace is None else grace
        end = loop.time() + seconds
        await self._server.stop(grace)
        left = max(end - loop.time(), LAST_SECONDS) if seconds else 0.0
        await loop.run_in_executor(None, self._http.end, left)


async def stop_when_told(server: Stoppable, stopping: asyncio.Event, grace: float) -> None:
    """Waits for a signal, then stops the server with `grace` seconds for running calls; a second signal stops it at
    once."""
    await stopping.wait()
    log.info("stopping: running calls may take %.0f s more", grace)
    stopping.clear()
    stop, again = asyncio.create_task(server.stop(grace)), asyncio.create_task(stopping.wait())
    await asyncio.wait({stop, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not stop.done():
        log.warning("second signal: stopping now")
        stop.cancel()
        await asyncio.wait({stop})
        await server.stop(grace=0)
    else:
        await stop
