"""The engine in this process, for asyncio: the part of `AsyncConnection` that `AsyncExchange` uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from typing import Any

from saccade._core.steps import Call
from saccade._transport.exchange import Exchange
from saccade._transport.local import LocalConnection


class AsyncLocalConnection:
    """A connection to an engine that its owner closes.

    Args:
        threads: the threads in which calls wait for the engine, one for each call in progress.
    """

    def __init__(self, connection: LocalConnection, threads: Executor) -> None:
        self._connection = connection
        self._threads = threads

    @property
    def closed(self) -> bool:
        return self._connection.closed

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return self._connection.alive

    def start(self, call: Call, message: Any, timeout: float | None, metadata: object = None) -> AsyncLocalCall:
        """A call that begins when it is awaited, or first read.

        Args:
            message: `call.message`; unused. So is `metadata`: an engine in this process has neither uploads nor keys.
        """
        return AsyncLocalCall(self._connection.exchange(), call, timeout, self._threads)

    def keep(self, pause: asyncio.Future[None]) -> None:
        """Does nothing: closing the engine does not end a caller's pause between two attempts."""

    async def close(self) -> None:
        """Does nothing: the engine is closed by its owner."""


class AsyncLocalCall:
    """One call: awaited for a single answer, or read for a stream. Both raise SaccadeError."""

    def __init__(self, exchange: Exchange, call: Call, timeout: float | None, threads: Executor) -> None:
        self._exchange, self._call, self._timeout, self._threads = exchange, call, timeout, threads
        self._opened = False

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await self._in_thread(self._exchange.send, self._call, self._timeout)
        finally:
            self._exchange.close()  # cancels the work if this task has been cancelled

    async def read(self) -> Any:
        """The next message of a stream; `grpc.aio.EOF` at its end."""
        import grpc

        if not self._opened:
            self._opened = True
            await self._in_thread(self._exchange.open, self._call, self._timeout, "")
        message = await self._in_thread(self._exchange.receive, None)
        return grpc.aio.EOF if message is None else message

    def cancel(self) -> None:
        self._exchange.close()

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
