"""The HTTP server's address: what the server needs if other machines can reach it, and the listening socket."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
from typing import Any
from weakref import WeakSet

from service.common.config import ConfigError, HttpFrontOptions, HttpOptions
from service.common.option import cannot_listen, host_port, without_brackets
from service.common.tls import is_loopback

ANY_HOST = "*"
"""In `http_allowed_hosts`: requests for any host name are answered."""
SPARE = 64
"""Connections beyond `http_max_connections` that are accepted, to be answered with status 503."""
_PACKAGES = ("starlette", "uvicorn", "httptools", "pydantic", "python_multipart")


def check_packages() -> None:
    """Raises ConfigError if a package of the HTTP server is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"http_port: {', '.join(missing)} is not installed: pip install 'saccade-server[http]'")


def check_exposure(options: HttpFrontOptions) -> None:
    """Raises ConfigError if other machines can reach the address and the server has no TLS, unless `insecure` is set.
    API keys are not needed here, because the gRPC servers check them."""
    if not options.insecure and options.tls_cert is None and not is_loopback(options.http_host, "http_host"):
        raise ConfigError(
            f"http_host: {options.http_host} can be reached from other machines, but this server has no TLS "
            "(--tls-cert and --tls-key); set these options, listen on 127.0.0.1 behind a proxy with TLS, or set "
            "--insecure"
        )


def bind(options: HttpOptions, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    host = without_brackets(options.http_host)
    with contextlib.ExitStack() as failing:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            # A name like localhost may have addresses of both kinds.
            family, kind, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
            listener = failing.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            raise cannot_listen("http_host", "http_port", host, port, error) from None
        failing.pop_all()
    return listener


class Listener(socket.socket):
    """A listening socket that closes connections beyond a limit as soon as they are accepted.

    The protocol counts connections too, and answers those beyond its limit, but only once their TLS handshakes are
    complete. Each one takes a descriptor and 0.3 MiB before.
    """

    def __init__(self, listening: socket.socket, limit: int) -> None:
        """`listening`: the socket, which is duplicated."""
        super().__init__(listening.family, listening.type, listening.proto, os.dup(listening.fileno()))
        self._limit = limit
        self.accepted: WeakSet[_Accepted] = WeakSet()
        """Open connections."""

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError for one that is beyond the limit."""
        plain, address = super().accept()
        if len(self.accepted) >= self._limit:
            plain.close()
            raise ConnectionAbortedError("too many connections")
        connection = _Accepted(plain.family, plain.type, plain.proto, plain.detach())
        connection.among = self.accepted
        self.accepted.add(connection)
        return connection, address


class _Accepted(socket.socket):
    """A connection that is counted until it is closed."""

    among: WeakSet[_Accepted]

    def close(self) -> None:
        self.among.discard(self)
        super().close()


def url_of(listener: socket.socket, tls: bool) -> str:
    """The URL of the server."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{host_port(host, port)}"
