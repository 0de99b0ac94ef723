"""The gRPC servers behind the HTTP server: which server gets a call, and calls with the caller's own metadata."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from saccade._async.driver import run
from saccade._core.affinity import prompt_key
from saccade._core.resuming import StreamState
from saccade._core.retrying import Deadline
from saccade._core.settings import CallSettings, Settings, make_settings
from saccade._core.steps import Call
from saccade._transport.aio import AsyncConnection, AsyncExchange
from saccade._transport.local_aio import AsyncLocalConnection
from saccade.errors import (
    NotFound,
    Overloaded,
    PermissionDenied,
    RateLimited,
    SaccadeError,
    Unavailable,
    error_from_rpc,
)
from saccade.types import Delta
from saccade.v1 import inference_pb2, model_pb2
from service.common.config import HttpFrontOptions
from service.common.http_requests import ACCEPTED, CHECK_KEY, HOLD
from service.http.tls import servers_tls

log = logging.getLogger(__name__)

Connection = AsyncConnection | AsyncLocalConnection
Metadata = tuple[tuple[str, str], ...]
T = TypeVar("T")
R = TypeVar("R")
CONCURRENT = 16
"""Calls of one request that run at a time."""
ANSWER_SECONDS = 5.0
"""Seconds that a server may take to answer a question to all servers, if there are several."""
SOCKET_BACKOFF, BACKOFF = 100, 1000
"""Milliseconds between two attempts to connect to a Unix socket that does not exist yet, and at most to a server that
cannot be reached."""
_BACKOFF = ("grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms")
RESUMES = 8
"""Attempts to continue an interrupted answer, counted from its last piece."""
HOLD_SECONDS = 1.0
"""Seconds that a server may take to accept a request of several calls, which then begin anyway."""


class Upstream:
    """Connections to all servers.

    Args:
        engine: the engine in this process, which is used instead of the servers in `options`.
    """

    def __init__(self, options: HttpFrontOptions, engine: AsyncLocalConnection | None = None) -> None:
        self._turn = itertools.count()
        self._connections: list[Connection]
        self._tls = servers_tls(options)
        self._used = None if self._tls is None else self._tls.current()
        self.addresses: tuple[str, ...] = options.servers
        self.names: tuple[str, ...] = ("this process",)
        """Of the servers, for clients: private sockets are not shown to them."""
        self.holders: list[AsyncConnection] = []
        """Connections through the private sockets of this `saccade serve`, for calls that hold requests open. They are
        separate: if all calls of a connection were such calls, the requests' own calls would wait for them forever."""
        if engine is not None:
            self.addresses, self._connections = self.names, [engine]
            return
        self.names = tuple(
            f"frontend {i}" if address.startswith("unix:") else address for i, address in enumerate(options.servers)
        )
        self._connections = [AsyncConnection(self._settings(address)) for address in options.servers]
        private = [address for address in options.servers if address.startswith("unix:")]
        self.holders = [AsyncConnection(self._settings(address)) for address in private]

    def _settings(self, address: str) -> Settings:
        channel_options = {"grpc.max_receive_message_length": -1, _BACKOFF[1]: BACKOFF}
        if address.startswith("unix:"):  # probes during the start must not delay the connection after it
            channel_options |= dict.fromkeys(_BACKOFF, SOCKET_BACKOFF)
        return make_settings(
            address, api_key="", tls=self._used, timeout=None, max_retries=0, channel_options=channel_options
        )

    @property
    def connections(self) -> list[Connection]:
        """One to each server. Calls that begin from now on use the present certificates."""
        if self._tls is not None and (current := self._tls.current()) is not self._used:
            self._used = current
            for address, connection in zip(self.addresses, self._connections, strict=True):
                if isinstance(connection, AsyncConnection):
                    connection.renew(self._settings(address))
        return self._connections

    def order(self, message: Any) -> list[Connection]:
        """The servers in the order in which a call tries them. Prompts with the same key have the same order, so that
        their images and beginnings are in the first server's caches; other calls begin with the servers in turn."""
        connections = self.connections
        if len(connections) == 1:
            return connections
        key = prompt_key(message) if isinstance(message, inference_pb2.GenerateRequest) else ""
        if key:
            return self.order_of(key)
        first = next(self._turn) % len(connections)
        return connections[first:] + connections[:first]

    def order_of(self, key: str) -> list[Connection]:
        """The servers in an order that depends on the key."""
        ranked = sorted(
            zip(self.addresses, self.connections, strict=True),
            key=lambda entry: hashlib.blake2b((key + entry[0]).encode(), digest_size=8).digest(),
        )
        return [connection for _, connection in ranked]

    async def close(self) -> None:
        for connection in (*self._connections, *self.holders):
            await connection.close()


class Caller:
    """Makes the gRPC calls of one HTTP request, with its metadata and deadline."""

    def __init__(self, upstream: Upstream, metadata: Metadata, timeout: float) -> None:
        self.upstream, self.metadata = upstream, metadata
        self.deadline = Deadline(timeout)

    @contextlib.asynccontextmanager
    async def as_one(self, several: bool) -> AsyncIterator[None]:
        """If the calls within this context are `several`, this `saccade serve` accepts or rejects them together when it
        drains, and waits for the end of the context. Other servers decide about each call by itself."""
        holders = self.upstream.holders if several else []
        holds = [holder.grpc_channel().unary_stream(HOLD)(b"", timeout=self.deadline.left()) for holder in holders]
        try:
            if any(await asyncio.gather(*(_is_accepted(hold) for hold in holds))):
                self.metadata = (*self.metadata, (ACCEPTED, "1"))
            yield
        finally:
            for hold in holds:
                hold.cancel()

    async def call(self, service: str, method: str, message: Any, *, on: Connection | None = None) -> Any:
        """The answer of a unary call, from the first server that accepts it. Raises SaccadeError."""
        failure: SaccadeError | None = None
        for connection in [on] if on is not None else self.upstream.order(message):
            exchange = AsyncExchange(_Authorized([connection], self.metadata))
            try:
                return await exchange.send(Call(service, method, message), self.deadline.left())
            except (Unavailable, Overloaded) as error:
                failure = error
            finally:
                exchange.close()
        assert failure is not None
        raise failure

    async def create(self, service: str, method: str, message: Any, request_id: str) -> Any:
        """The answer of a call that creates something, whose message contains `request_id`: what a server has created
        for it, it does not create again. So calls with the same id go to the same server, and once more to it if the
        answer is lost. Raises SaccadeError."""
        failure: SaccadeError | None = None
        for connection in self.upstream.order_of(request_id):
            for _ in range(2):
                try:
                    return await self.call(service, method, message, on=connection)
                except (Unavailable, Overloaded) as error:
                    failure = error
                    if error.reason:  # the server has refused
                        break
        assert failure is not None
        raise failure

    async def check_key(self) -> None:
        """Asks one server after the other until one says whether it knows the caller's key. Raises Unauthenticated if
        it does not, and the error of one server if none answers."""
        failure: SaccadeError | None = None
        for connection in self.upstream.order(None):
            name = self.upstream.names[self.upstream.connections.index(connection)]
            try:
                return await self.soon(name, self._check_key(connection))
            except (Unavailable, Overloaded) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _check_key(self, connection: Connection) -> None:
        if isinstance(connection, AsyncLocalConnection):  # an engine in this process has no keys
            return
        try:
            await connection.grpc_channel().unary_unary(CHECK_KEY)(
                b"", metadata=self.metadata, timeout=self.deadline.left()
            )
            return
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                raise error_from_rpc(error) from error
        # The server is older. It counts this as one of the key's requests.
        with contextlib.suppress(PermissionDenied, RateLimited):  # of a key that it knows
            await self.call("model", "ListModels", model_pb2.ListModelsRequest(), on=connection)

    async def of_any(self, ask: Callable[[Connection], Awaitable[T]]) -> T:
        """What the first server that does not fail answers to `ask`. Raises the error of one if all fail, NotFound only
        if that is what all say."""
        named = zip(self.upstream.names, self.upstream.connections, strict=True)
        asked = [asyncio.ensure_future(self.soon(name, ask(each))) for name, each in named]
        failure: SaccadeError | None = None
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    return await answer
                except SaccadeError as error:
                    failure = error if failure is None or isinstance(failure, NotFound) else failure
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        assert failure is not None
        raise failure

    async def of_each(self, ask: Callable[[Connection], Awaitable[T]]) -> tuple[list[T], dict[str, SaccadeError]]:
        """What the servers answer to `ask`, and by name the errors of those that fail or do not answer within
        `ANSWER_SECONDS`. Raises the error of one if all fail."""
        names, connections = self.upstream.names, self.upstream.connections
        asked = [self.soon(name, ask(each)) for name, each in zip(names, connections, strict=True)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        found, failures = [], {}
        for name, result in zip(names, results, strict=True):
            if isinstance(result, SaccadeError):
                failures[name] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                found.append(result)
        if not found:
            raise next(iter(failures.values()))
        return found, failures

    async def soon(self, name: str, answer: Awaitable[T]) -> T:
        """The answer of the server of this name. Raises Unavailable if there are several servers and this one does not
        answer within `ANSWER_SECONDS`: others may, and a server that hangs would delay them for as long as gRPC takes
        to give up its connection."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS if len(self.upstream.connections) > 1 else None):
                return await answer
        except TimeoutError:
            words = f"the server {name} has not answered within {ANSWER_SECONDS:g} s"
            raise Unavailable(words, retryable=True) from None

    async def messages(
        self, service: str, method: str, message: Any, *, on: Connection, timeout: float | None
    ) -> AsyncGenerator[Any, None]:
        """The messages of a stream of one server. `timeout`: seconds for all of them; None: as long as they are read.
        Raises SaccadeError."""
        exchange = AsyncExchange(_Authorized([on], self.metadata))
        try:
            await exchange.open(Call(service, method, message), timeout, "")
            while (received := await exchange.receive(None)) is not None:
                yield received
        finally:
            exchange.close()

    def stream(self, request: inference_pb2.GenerateRequest) -> Answer:
        """A streamed answer, from the first server that accepts the request."""
        return Answer(request, _Authorized(self.upstream.order(request), self.metadata), self.deadline)


async def _is_accepted(hold: Any) -> bool:
    """Whether a server holds a request open. If it does not, it says why when it rejects the request's calls."""
    try:
        async with asyncio.timeout(HOLD_SECONDS):
            return await hold.read() is not grpc.aio.EOF
    except grpc.RpcError:
        return False
    except TimeoutError:
        log.warning("a drain may end a request: the server has not accepted it within %g s", HOLD_SECONDS)
        return False


async def all_of(make: Callable[[T], Awaitable[R]], items: Sequence[T]) -> list[R]:
    """The results of a call for each item, in order. The first error cancels the rest."""
    results: dict[int, R] = {}
    left = iter(enumerate(items))

    async def some() -> None:
        for place, item in left:
            results[place] = await make(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(CONCURRENT, len(items))):
                group.create_task(some())
    except* SaccadeError as errors:
        failure: BaseException = errors
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None
    return [results[place] for place in range(len(items))]


class _Authorized:
    """The connections for one caller. Each attempt of a call goes to the next one, with the caller's metadata."""

    def __init__(self, connections: Sequence[Connection], metadata: Metadata) -> None:
        self._connections, self._metadata = connections, metadata
        self._attempts = 0

    @property
    def closed(self) -> bool:
        return self._connections[0].closed

    @property
    def untried(self) -> bool:
        """Whether there is a connection to which no attempt has gone yet."""
        return self._attempts < len(self._connections)

    def start(self, call: Call, message: Any, timeout: float | None) -> Any:
        connection = self._connections[self._attempts % len(self._connections)]
        self._attempts += 1
        return connection.start(call, message, timeout, self._metadata)

    def keep(self, pause: asyncio.Future[None]) -> None:
        self._connections[0].keep(pause)


class _State(StreamState):
    """Resumes streams that have begun. A request that no server has accepted is tried once on each server, and then
    fails."""

    connections: _Authorized

    def delay_after(self, error: SaccadeError) -> float:
        if self.assembler.started is not None:
            return super().delay_after(error)
        if isinstance(error, Unavailable | Overloaded) and self.connections.untried:
            return 0.0
        raise error from error.__cause__


class Answer:
    """A streamed answer. If its server stops, it is continued on the next one, after the tokens received so far."""

    def __init__(self, request: inference_pb2.GenerateRequest, connections: _Authorized, deadline: Deadline) -> None:
        self._exchange = AsyncExchange(connections)
        self.state = _State(request, CallSettings(timeout=None, max_retries=RESUMES), deadline, resume=True)
        self.state.connections = connections

    async def start(self) -> inference_pb2.Started:
        """Waits until a server has admitted the request. Raises SaccadeError."""
        await run(self.state.begin(), self._exchange)
        while self.state.assembler.started is None:
            response = await run(self.state._receive(), self._exchange)
            if response is None:
                break
            self.state.take(response)
        assert self.state.assembler.started is not None
        return self.state.assembler.started

    async def read(self) -> Delta | None:
        """The next piece; None at the end. Raises SaccadeError."""
        return await run(self.state.read(), self._exchange)

    def close(self) -> None:
        """Cancels the rest of the answer."""
        self._exchange.close()
