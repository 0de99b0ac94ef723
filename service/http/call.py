"""One HTTP request: reading its body within limits, the caller's metadata, the answer, and clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from saccade._openai.documents import load_json
from saccade._openai.errors import error_object, status_code
from saccade._openai.fields import CHAT
from saccade._transport.local_aio import AsyncLocalConnection
from saccade.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MessageTooLarge,
    Overloaded,
    SaccadeError,
    Unavailable,
    Unimplemented,
)
from service.common.config import HttpFrontOptions
from service.http.file_store import FileStore, owner_of
from service.http.json_text import compact
from service.http.ranges import Unsatisfiable
from service.http.upstream import Caller, Upstream

log = logging.getLogger(__name__)

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PASSED = ("authorization", "x-api-key", "traceparent", "tracestate")
"""Headers that are passed to gRPC servers as metadata."""
MAX_REQUEST_ID = 128
_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID}}}")
OTHER_ROUTE = "other"
"""The label in metrics of pages, and of requests that no route answers."""
BESIDE_THE_LOOP = 256 * 1024
"""Bodies of at least this many bytes are parsed in a thread, so that other streams continue meanwhile."""

STRANGER_BYTES = 64 * 1024
"""Bytes of a body that are read before a server has said that it knows the caller's key."""
KNOWN_SECONDS, MAX_KNOWN_KEYS = 300.0, 4096
"""Seconds for which a server is not asked again, and the number of keys that are remembered. A server of an older
release counts the question as one of the key's requests, so it must be rarer than one a minute, the lowest rate."""


class ClientGone(Exception):
    """The client has closed its connection, or does not read the answer."""


class WrongContent(SaccadeError):
    """The content type or coding of the body is not supported."""


class BodyBudget:
    """Bytes of request bodies that are held at a time."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def add(self, size: int) -> None:
        """Counts bytes. Raises Overloaded if they exceed the budget."""
        if self.used + size > self.limit:
            raise Overloaded(
                f"the bodies of all requests hold {self.used} of {self.limit} bytes, and this one needs {size} more",
                reason="QUEUE_FULL", retryable=True, retry_after=1.0,
            )  # fmt: skip
        self.used += size


class KnownKeys:
    """Hashes of API keys that a server has known lately."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}

    def __contains__(self, owner: bytes) -> bool:
        return self._until.get(owner, 0.0) > time.monotonic()

    def add(self, owner: bytes) -> None:
        self._until.pop(owner, None)  # so that the first one is the oldest
        if len(self._until) == MAX_KNOWN_KEYS:
            del self._until[next(iter(self._until))]
        self._until[owner] = time.monotonic() + KNOWN_SECONDS


class Front:
    """What all requests share."""

    def __init__(self, options: HttpFrontOptions, engine: AsyncLocalConnection | None = None) -> None:
        self.options = options
        self.upstream = Upstream(options, engine)
        self.grpc_address = options.servers[0]
        """HOST:PORT where clients reach gRPC. As a part of `saccade serve`, a Unix socket until the port is known."""
        self.budget = BodyBudget(options.max_inflight_bytes)
        self.known_keys = KnownKeys()
        self.calls: dict[tuple[str, int], int] = {}
        """Requests that have ended, by route and status."""
        self.files = FileStore(options.http_file_bytes, options.http_file_dir, key_capacity=options.http_file_key_bytes)
        self.routes: tuple[tuple[str, str, str], ...] = ()
        """Method, path and summary of each route."""
        self.running = 0
        self.streams = 0
        """Answers that are being streamed."""

    def count(self, route: str, status: int) -> None:
        """Counts a request that has ended. `route`: `OTHER_ROUTE` for those of no route in the list."""
        self.calls[route, status] = self.calls.get((route, status), 0) + 1


class HttpCall:
    """One request. Used by its handler, in one task."""

    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send) -> None:
        self.front, self.scope, self.receive, self._send = front, scope, receive, send
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers[name.decode("latin-1")] = value.decode("latin-1")
        self.request_id = request_id_of(self.headers)
        self.started = False
        self.status = 0
        self.notes: list[tuple[str, str]] = []
        """Further headers of the answer."""
        self.error_form: Callable[[dict[str, Any], int], dict[str, Any]] | None = None
        """Converts OpenAI's form of an error to that of another API; None: OpenAI's form is used."""
        self.fields = CHAT
        """Rules for the names of the request's fields in errors."""
        self.held = 0
        """Bytes of the body that are counted in the budget."""
        self._sending_since: float | None = None

    # -- what the client sends -----------------------------------------------------------------------------------------

    def caller(self) -> Caller:
        """Makes calls with the client's metadata and deadline. Raises InvalidArgument for headers that cannot be passed
        on."""
        metadata = tuple((name, self.headers[name]) for name in PASSED if name in self.headers)
        for name, value in metadata:
            if not value.isascii() or not value.isprintable():
                raise InvalidArgument(f"the header {name} has characters that are not printable ASCII")
        return Caller(self.front.upstream, (*metadata, ("x-request-id", self.request_id)), self.timeout())

    def id_of_prompt(self, index: int, count: int) -> str:
        """The request id for one of `count` prompts, within the allowed length: the call's own if it is the only
        one."""
        number = f"-{index}" if count > 1 else ""
        return self.request_id[: MAX_REQUEST_ID - len(number)] + number

    def timeout(self) -> float:
        """Seconds that the call may take: the header `x-request-timeout`, but at most `default_timeout`."""
        limit = self.front.options.default_timeout
        text = self.headers.get("x-request-timeout")
        if text is None:
            return limit
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidArgument(f"x-request-timeout: expected a number of seconds above 0, got {text[:40]!r}")
        return min(seconds, limit)

    @property
    def priority(self) -> int | None:
        """The value of the header `x-priority`; None without it."""
        text = self.headers.get("x-priority")
        if text is None:
            return None
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise InvalidArgument(f"x-priority: expected a whole number, got {text[:40]!r}")
        return int(text)

    async def body(self) -> bytes:
        """The whole body. Raises SaccadeError if it is too large or too slow, and ClientGone."""
        options = self.front.options
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            coding = self.headers["content-encoding"][:40]
            raise WrongContent(f"content-encoding: expected none, got {coding!r}", reason="WRONG_CONTENT")
        declared = self.headers.get("content-length", "")
        if declared.isdigit():
            self._check_size(int(declared))
            await _check_key(self, int(declared))
        chunks: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        end = loop.time() + options.receive_timeout
        while True:
            try:
                async with asyncio.timeout_at(end):
                    message = await self.receive()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the body did not arrive within {options.receive_timeout:g} s", reason="SLOW_WRITER"
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            self._check_size(size)
            asked = loop.time()
            await _check_key(self, size)
            end += loop.time() - asked  # meanwhile nothing is read
            self.front.budget.add(len(chunk))
            self.held += len(chunk)
            chunks.append(chunk)
            if not message.get("more_body"):
                return b"".join(chunks)

    def _check_size(self, size: int) -> None:
        options = self.front.options
        limit = min(options.max_message_bytes, options.max_inflight_bytes)  # more would never fit into the budget
        if size > limit:
            raise MessageTooLarge(f"the body has more than {limit} bytes: {size}", reason="MESSAGE_TOO_LARGE")

    def check_content_type(self, expected: str) -> None:
        """Raises WrongContent for a body of another media type than `expected`."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != expected:
            raise WrongContent(f"content-type: expected {expected}, got {kind[:60]!r}", reason="WRONG_CONTENT")

    async def json(self) -> Any:
        """The body as JSON. Raises SaccadeError and ClientGone."""
        self.check_content_type("application/json")
        data = await self.body()
        return await beside(len(data), load_json, data)

    def release(self) -> None:
        """Releases the bytes of the body, at the end of the request."""
        self.front.budget.used -= self.held
        self.held = 0

    def note_missing(self, servers: Iterable[str]) -> None:
        """Names servers that have not contributed to the answer in one of its headers."""
        if names := ", ".join(servers):
            self.notes.append(("x-saccade-missing-servers", names))

    # -- what the client receives --------------------------------------------------------------------------------------

    async def respond(self, document: Any, status: int = 200, headers: Sequence[tuple[str, str]] = ()) -> None:
        """Sends a JSON document."""
        body = compact(document).encode("utf-8", "replace")
        await self.respond_bytes(body, "application/json", status, headers)

    async def respond_bytes(
        self, body: bytes, content_type: str, status: int = 200, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        await self.start(status, content_type, [*headers, ("content-length", str(len(body)))])
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, content_type: str, headers: list[tuple[str, str]]) -> None:
        """Sends the status and the headers."""
        self.started, self.status = True, status
        listed = [("content-type", content_type), ("x-request-id", self.request_id), *headers, *self.notes]
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in listed]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        """Sends a piece of a streamed body; see `connected` for clients that do not read."""
        await self._send_piece(data, more=True)

    async def end(self) -> None:
        """Ends a streamed body. This may wait for the client too, so it belongs inside the context of `connected`."""
        await self._send_piece(b"", more=False)

    async def _send_piece(self, data: bytes, *, more: bool) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._sending_since = None

    async def fail(self, error: SaccadeError) -> None:
        """Answers with an error, in OpenAI's form unless `error_form` is set."""
        status = http_status(error)
        error.request_id = error.request_id or self.request_id
        headers = retry_headers(error, status)
        told: dict[str, Any] = {"error": error_object(error, status, self.fields)}
        if self.error_form is not None:
            told = self.error_form(told["error"], status)
        await self.respond(told, status, headers)

    def connected(self) -> Connected:
        """A context that ends with ClientGone when the client closes its connection, or has not read a piece of the
        answer for `stall_timeout` seconds."""
        return Connected(self)


async def _check_key(call: HttpCall, size: int) -> None:
    """Asks a server whether it knows the caller's key before more than `STRANGER_BYTES` of a body are read: calls are
    made only when all of it has been read. Raises Unauthenticated if it does not, and Unavailable if no server has
    answered within `receive_timeout`, for which a client would also hold a connection with a body."""
    if size <= STRANGER_BYTES:
        return
    owner = owner_of(call.headers)
    if owner not in call.front.known_keys:
        seconds = call.front.options.receive_timeout
        try:
            async with asyncio.timeout(seconds):
                await call.caller().check_key()
        except TimeoutError:
            words = f"no server has said within {seconds:g} s (receive_timeout) whether it knows the key"
            raise Unavailable(words, retryable=True) from None
        call.front.known_keys.add(owner)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The header `x-request-id`, or a new id if it is missing or unusable."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


class Connected:
    """See `HttpCall.connected`."""

    def __init__(self, call: HttpCall) -> None:
        self._call = call
        self._gone = False
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._before = task, task.cancelling()
        self._watch = self._loop.create_task(self._until_disconnect())
        self._timer = self._loop.call_later(self._call.front.options.stall_timeout / 2, self._look)

    async def _until_disconnect(self) -> None:
        while (await self._call.receive())["type"] != "http.disconnect":
            pass
        self._end()

    def _look(self) -> None:
        timeout, since = self._call.front.options.stall_timeout, self._call._sending_since
        if since is not None and self._loop.time() - since > timeout:
            log.warning("a client has not read its stream for %g s: the answer is dropped", timeout)
            if (abort := self._call.scope.get("abort")) is not None:  # set by `service.http.protocol`
                abort()
            self._end()
        else:
            self._timer = self._loop.call_later(timeout / 2, self._look)

    def _end(self) -> None:
        if not self._gone:
            self._gone = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._watch.cancel()
        self._timer.cancel()
        if self._gone and self._task.uncancel() <= self._before and kind is not None:
            raise ClientGone from None


async def beside(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function whose work grows with `size` bytes. For large sizes it runs in a thread, so that it does
    not block the event loop."""
    if size < BESIDE_THE_LOOP:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def http_status(error: SaccadeError) -> int:
    """The status of an error's answer."""
    if isinstance(error, WrongContent):
        return 415
    if isinstance(error, Unsatisfiable):
        return 416
    if isinstance(error, Unimplemented):  # the request asks for something that the server does not support
        return 400
    if isinstance(error, DeadlineExceeded) and error.reason == "SLOW_WRITER":
        return 408
    return status_code(error)


def retry_headers(error: SaccadeError, status: int) -> list[tuple[str, str]]:
    """Headers that tell clients when to retry, for statuses 429 and 503."""
    if status not in (429, 503):
        return []
    if not error.retryable and status == 429:
        return [("x-should-retry", "false")]
    seconds = error.retry_after if error.retry_after is not None else 1.0
    return [("retry-after", str(max(1, math.ceil(seconds)))), ("retry-after-ms", str(round(seconds * 1000)))]


Handler: TypeAlias = Callable[[HttpCall], Awaitable[None]]


class Endpoint:
    """A handler as an ASGI application: exceptions become answers, and the resources of the call are released."""

    def __init__(self, front: Front, name: str, handle: Handler) -> None:
        self._front, self._name, self._handle = front, name, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front, call = self._front, HttpCall(self._front, scope, receive, send)
        front.running += 1
        try:
            await self._answered(call)
        finally:
            front.running -= 1
            call.release()
            front.count(self._name, call.status)

    async def _answered(self, call: HttpCall) -> None:
        try:
            await self._handle(call)
        except ClientGone:
            call.status = 499
        except SaccadeError as error:
            if call.started:
                raise
            await call.fail(error)
        except Exception:
            log.exception("%s failed, request %s", self._name, call.request_id)
            if call.started:
                raise
            await call.fail(Internal("the HTTP server failed", reason="INTERNAL", request_id=call.request_id))


def path_values(scope: Scope) -> Mapping[str, str]:
    """Values of the route's parameters."""
    values: Mapping[str, str] = scope.get("path_params", {})
    return values
