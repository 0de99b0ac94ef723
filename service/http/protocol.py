"""uvicorn's HTTP/1.1 protocol with limits that it lacks: size and time of a request's head (request line and headers),
time of a body after the answer, and number of connections.

There is only HTTP/1.1, because uvicorn's HTTP/2 needs `zttp`, which is at version 0.0. For HTTP/2 and HTTP/3, use a
proxy such as Caddy or Envoy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.common.config import HttpFrontOptions

log = logging.getLogger(__name__)

LINGER_SECONDS, STOPPING_SECONDS = 30.0, 1.0
"""Seconds for which the rest of a body is read and dropped after an answer that came before its end, and the same while
the server stops, which waits for it. A connection that is closed with unread data is reset, and the client's system may
then drop the answer."""

PIPELINED, SLICE = 64, 16 * 1024
"""Requests that may wait for the answer to another one of their connection before no more bytes are parsed, and the
number of bytes that are parsed at a time: a waiting request takes a hundred times the bytes of a short head."""


class _Flow(FlowControl):
    """Reads nothing more while bytes wait that have not been parsed, which would be copied with each answer."""

    def __init__(self, transport: asyncio.Transport, waiting: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting():
            super().resume_reading()


def protocol_class(options: HttpFrontOptions) -> type[HttpToolsProtocol]:
    """The protocol with the limits in `options`."""

    class Limited(LimitedProtocol):
        limits = options

    return Limited


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `scope["abort"]` closes it without waiting for a client that does not read."""

    limits: HttpFrontOptions

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes: int | None = 0
        """Bytes received since the last request's end; None while a body arrives."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._unparsed = b""
        """What has arrived after too many requests that wait for answers."""
        self._last_answer = False
        """The answer has told the client that the connection ends with it."""
        self._linger_seconds = LINGER_SECONDS
        self._linger_timer: asyncio.TimerHandle | None = None
        self._tls: socket.socket | None = None
        """The socket, if the client uses TLS. A transport that was closed twice does not tell it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: bool(self._unparsed))
        _drop_unread(transport, self.limits.stall_timeout)
        if transport.get_extra_info("ssl_object") is not None:
            self._tls = transport.get_extra_info("socket")
        if len(self.connections) > self.limits.http_max_connections:
            self._refuse(503, f"the server has reached its limit of {self.limits.http_max_connections} connections")
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_bytes is not None and self._head_timer is None:
            self._await_head()
        self._unset_keepalive_if_required()
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Like uvicorn's `data_received`, but a request for another protocol is answered as any other request (RFC
        9110, 7.8). Java's client, for example, asks for HTTP/2 in each first request of a connection. The parser takes
        what follows such a head for the other protocol, so another parser reads the head without `upgrade`, and the
        rest."""
        view, at = memoryview(self._unparsed + data), 0
        self._unparsed = b""
        try:
            while at < len(view):
                if len(self.pipeline) >= PIPELINED:
                    self._unparsed = bytes(view[at:])
                    self.flow.pause_reading()
                    return
                piece = view[at : at + SLICE]
                if self._head_bytes is not None:
                    self._head_bytes += len(piece)
                try:
                    self.parser.feed_data(piece)
                    at += len(piece)
                except httptools.HttpParserUpgrade as upgrade:
                    at += upgrade.args[0]
                    head = _without_upgrade(self.parser, self.url, self.headers)
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
                    self.parser.feed_data(head)
                if self._head_bytes is not None:
                    self._check_head(self._head_bytes)
        except httptools.HttpParserError:
            log.warning("Invalid HTTP request received.")
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """White space after a value is no part of it (RFC 9110, 5.5), and the parser keeps it."""
        super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this server is no proxy")  # answered as other invalid requests are
            return  # `_parse` gives the head to another parser
        self._head_bytes = None
        self._head_arrived()
        # Not checked by `data_received` if it arrived at once.
        self._check_head(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        if self.transport.is_closing():
            raise ConnectionAbortedError  # stops the parser
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _send_without_chunks(self.cycle)
        self._end_with_unread(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._head_bytes = 0
        super().on_message_complete()
        if self._linger_timer is not None:
            self.transport.close()

    def _end_with_unread(self, cycle: RequestResponseCycle) -> None:
        """Makes an answer that begins before the end of its request's body the last one of the connection. Otherwise
        the client would have to send the whole body, for which there would be no time limit."""
        plain = cycle.send

        async def send(message: Any) -> None:
            ends = message["type"] == "http.response.start" and cycle.more_body
            if ends:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await plain(message)
            if ends:
                cycle.keep_alive = True  # uvicorn would close the connection, which `on_response_complete` does
                self._last_answer = True

        cycle.send = send  # type: ignore[method-assign]

    def on_response_complete(self) -> None:
        if self._last_answer and (self._head_bytes is not None or self.pipeline):  # the body has ended meanwhile
            self.transport.close()
        super().on_response_complete()
        if self._unparsed and not self.transport.is_closing():
            self._parse(b"")
        if self._last_answer and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._linger()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def _linger(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        stopping = self._linger_seconds == STOPPING_SECONDS
        close = partial(_close_without_answer, self.transport, self._tls) if stopping else self.transport.close
        self._linger_timer = self.loop.call_later(self._linger_seconds, close)

    def shutdown(self) -> None:
        """uvicorn's, which would reset a connection whose last answer has begun, and wait for idle clients with TLS."""
        self._linger_seconds = STOPPING_SECONDS
        if self._linger_timer is not None:
            self._linger()
        elif not self._last_answer:
            super().shutdown()
            if self.transport.is_closing():
                _close_without_answer(self.transport, self._tls)

    def _check_head(self, size: int) -> None:
        """Refuses a head of too many bytes."""
        if size > self.limits.http_max_header_bytes:
            self._refuse(431, f"the request line and headers have more than {self.limits.http_max_header_bytes} bytes")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.http_header_timeout, self._too_slow)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(
                408, f"the request line and headers did not arrive within {self.limits.http_header_timeout:g} s"
            )

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP/1.1 request")

    def _refuse(self, status: int, message: str) -> None:
        """Answers without the application, and closes the connection."""
        if self.transport.is_closing():
            return
        kind = "invalid_request_error" if status < 500 else "overloaded_error"
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": "HTTP"}}).encode()
        retry = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n{retry}\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _drop_unread(transport: asyncio.Transport, seconds: float) -> None:
    """Lets the system close the connection if sent data stays unread for too long, also after the request's end."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        milliseconds = max(1, min(2**31 - 1, round(seconds * 1000)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def _close_without_answer(transport: asyncio.Transport, tls: socket.socket | None) -> None:
    """Closes a connection. asyncio waits 30 s for the `close_notify` of clients with TLS, which they do not send while
    they keep an idle connection. `tls`: the socket of such a client."""
    transport.close()
    if tls is not None:
        with contextlib.suppress(OSError):  # it is not connected any more
            tls.shutdown(socket.SHUT_RD)  # which asyncio reads as the client's end


def _without_upgrade(parser: httptools.HttpRequestParser, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The head that the parser has read, without `upgrade`."""
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, parser.get_http_version().encode())]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """For a client of HTTP/1.0, which knows no chunks: the end of a body without `content-length` is that of the
    connection (RFC 9112, 6.1 and 6.3)."""
    plain, unknown = cycle.send, False

    async def send(message: Any) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if unknown:
                cycle.chunked_encoding = False
        elif unknown:  # uvicorn compares each piece with what is left of the body
            cycle.expected_content_length = len(message.get("body", b""))
        await plain(message)

    cycle.send = send  # type: ignore[method-assign]
