"""Runs the HTTP server: `saccade http`, or as a process beside `saccade serve`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import replace

import uvicorn

from service.common.config import ConfigError, HttpFrontOptions
from service.common.tls import check_pair, is_loopback
from service.http.app import make_app
from service.http.protocol import protocol_class

log = logging.getLogger(__name__)

DEFAULT_PORT = 8000


def run(options: HttpFrontOptions) -> int:
    """Serves until SIGTERM or SIGINT. Prints the ready line. Returns the exit code."""
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    options = replace(options, http_port=DEFAULT_PORT if options.http_port is None else options.http_port)
    check_exposure(options)
    listener = bind(options)
    server = HttpServer(options)

    async def serve() -> None:
        print(f"saccade http ready on {server.url(listener)}", flush=True)
        await server.serve(sockets=[listener])

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    asyncio.run(serve())
    return 0


def check_exposure(options: HttpFrontOptions) -> None:
    """Raises ConfigError for an address that others can reach without TLS, unless `insecure` is set. Keys are checked
    by the gRPC servers."""
    if not options.insecure and options.tls_cert is None and not is_loopback(options.http_host):
        raise ConfigError(
            f"http_host: {options.http_host} can be reached from other machines, and this server speaks plain text (no "
            "--tls-cert and --tls-key); give it those, or use 127.0.0.1 behind a proxy that has them, or say --insecure"
        )


def bind(options: HttpFrontOptions) -> socket.socket:
    """A listening socket. Raises ConfigError."""
    host = options.http_host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, options.http_port or 0))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"http_port: cannot listen on {host}:{options.http_port}: {why}") from None
    return listener


def tls_context(options: HttpFrontOptions) -> ssl.SSLContext | None:
    """The context for the TLS options. Raises ConfigError."""
    if options.tls_cert is None and options.tls_key is None and options.tls_client_ca is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        missing = "tls_cert" if options.tls_cert is None else "tls_key"
        raise ConfigError(f"{missing}: TLS needs both a certificate and its key")
    check_pair(options.tls_cert, options.tls_key, "tls_cert, tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options.tls_cert, options.tls_key)
    context.set_alpn_protocols(["http/1.1"])
    if options.tls_client_ca is not None:
        try:
            context.load_verify_locations(options.tls_client_ca)
        except OSError as error:
            raise ConfigError(f"tls_client_ca: {error.strerror or error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class HttpServer(uvicorn.Server):
    """uvicorn with our limits and without its own configuration of logging."""

    def __init__(self, options: HttpFrontOptions) -> None:
        self.options = options
        context = tls_context(options)
        self.app = make_app(options)
        config = uvicorn.Config(
            self.app, http=protocol_class(options), ws="none", loop="none", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(options.grace)),
        )  # fmt: skip
        config.load()
        config.ssl = context
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the server, which then exits with 0; a second one stops it at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told)
        yield

    def _told(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    def url(self, listener: socket.socket) -> str:
        """The address of the server, as people type it."""
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ipaddress.ip_address(host.partition("%")[0]).version == 6 else host
        return f"{'https' if self.config.ssl else 'http'}://{shown}:{port}"
