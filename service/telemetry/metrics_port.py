"""The HTTP endpoint of `--metrics-port`, for a few scrapers at a time: each connection takes a thread."""

from __future__ import annotations

import io
import logging
import socket
import sys
import threading
import time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

log = logging.getLogger(__name__)

MAX_SCRAPES = 16
"""Connections at a time; further ones are closed at once."""
READ_SECONDS = 10.0
"""Seconds within which the whole request must arrive, and the same for reading a part of the answer."""


class MetricsServer(ThreadingWSGIServer):
    """Serves the metrics of a registry."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Raises OSError if it cannot listen."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, (address, *_) = found[0]
        self._places = threading.Semaphore(MAX_SCRAPES)
        super().__init__((str(address), port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no more threads
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs no client that has gone or is too slow."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _InTime(io.RawIOBase):
    """A connection as a file, with its time limits."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._end = connection, time.monotonic() + READ_SECONDS

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(max(self._end - time.monotonic(), 0.001))  # 0 would not wait at all
        return self._connection.recv_into(buffer)

    def write(self, data: Any) -> int:
        self._connection.settimeout(READ_SECONDS)
        try:
            self._connection.sendall(data)
        except TimeoutError:
            log.warning("a client has not read its metrics for %g s: its connection is closed", READ_SECONDS)
            raise ConnectionAbortedError from None  # for which wsgiref logs no traceback
        return len(data)


class _Handler(WSGIRequestHandler):
    def setup(self) -> None:
        self.connection = self.request
        self.wfile = _InTime(self.connection)  # type: ignore[assignment]
        self.rfile = io.BufferedReader(self.wfile)  # type: ignore[type-var]

    def log_message(self, format: str, *args: Any) -> None:
        """Does not log requests."""
