"""A streamed answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from saccade._async.driver import run
from saccade._async.ports import AsyncExchange
from saccade._async.session import AsyncSession
from saccade._core.results import layouts_from
from saccade._core.resuming import StreamState
from saccade._core.settings import CallSettings
from saccade.errors import Cancelled, FailedPrecondition
from saccade.types import Delta, Generation, MediaLayout
from saccade.v1 import inference_pb2

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncStream(AsyncIterator[Delta]):
    """An answer as it is generated.

    `async for` yields its deltas; `await stream.final()` reads the rest and returns the whole answer. Leaving `async
    with` cancels the work on the server unless the answer is complete; so does `close()`, at any time.

    A stream that breaks because the server or its engine stopped is resumed after the tokens received so far, so the
    answer is the same as without the break, unless `resume=False` or the client's max_retries is 0. A stream that
    failed for good raises the same error whenever it is read. One thread or task at a time may read it.
    """

    def __init__(
        self,
        session: AsyncSession,
        build: Callable[[], inference_pb2.GenerateRequest],
        calls: CallSettings,
        timeout: float | None,
        resume: bool,
    ) -> None:
        self._session = session
        self._build = build
        self._calls = calls
        self._timeout = timeout
        self._resume = resume
        self._state: StreamState | None = None
        self._exchange: AsyncExchange | None = None
        self._closed = False
        self._turn = [True]
        """One element, which the reading thread or task takes out: `pop` succeeds in one of several threads only."""
        self._generation: Generation | None = None

    def __await__(self) -> Generator[Any, None, Self]:
        return self._opened().__await__()

    async def _opened(self) -> Self:
        """Sends the request, once."""
        if self._state is None and not self._closed:
            exchange = self._exchange = self._session._exchange()
            deadline = self._session._deadline(self._timeout)
            request = await exchange.do(self._build)
            state = StreamState(request, self._calls, deadline, self._resume)
            await run(state.begin(), exchange)
            self._state = state
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            turn = self._turn.pop()
        except IndexError:
            # Two readers would make gRPC end the thread that all calls of the client depend on.
            raise FailedPrecondition(
                "another thread or task is reading the stream", request_id=self.request_id
            ) from None
        try:
            return await self._next()
        finally:
            self._turn.append(turn)

    async def _next(self) -> Delta:
        if self._state is not None and self._state.failure is not None:
            raise self._state.failure
        await self._opened()
        if self._closed:
            raise StopAsyncIteration
        assert self._state is not None and self._exchange is not None
        try:
            delta = await run(self._state.read(), self._exchange)
        except BaseException as error:
            if not self._closed:
                self._state.failed(error)
            await self.close()
            raise
        if delta is not None:
            return delta
        if not self._closed:
            await self.close()
            self._generation = self._state.assembler.finish()
        raise StopAsyncIteration

    @property
    def request_id(self) -> str:
        """The request's id; empty until the request has been built."""
        return self._state.request.request_id if self._state else ""

    @property
    def text(self) -> str:
        """The first sample's text so far."""
        return self._state.assembler.text() if self._state else ""

    @property
    def token_ids(self) -> list[int]:
        """The first sample's token ids so far."""
        return self._state.assembler.token_ids() if self._state else []

    @property
    def seed(self) -> int | None:
        """The seed in use, known from the stream's first message on."""
        return self._state.seed if self._state else None

    @property
    def media(self) -> list[MediaLayout]:
        """How each image and clip was divided, known from the stream's first message on; empty before."""
        started = self._state.assembler.started if self._state else None
        return layouts_from(started.media) if started else []

    async def final(self) -> Generation:
        """Reads the stream to its end and returns the whole answer.

        Raises:
            Cancelled: the stream was closed before its end.
            SaccadeError: the stream failed; each further call raises the same error.
        """
        async for _ in self:
            pass
        if self._generation is None:
            raise Cancelled("the stream was closed before its end", request_id=self.request_id)
        return self._generation

    async def close(self) -> None:
        """Cancels the rest of the answer. `text`, `token_ids` and the other properties keep what has been received."""
        self._closed = True
        if self._exchange is not None:
            self._exchange.close()

    async def __aenter__(self) -> Self:
        return await self._opened()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
