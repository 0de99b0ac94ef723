"""Runs the HTTP server: `saccade http`, or as a process beside `saccade serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator

import uvicorn

from service.common.config import ConfigError, HttpFrontOptions
from service.common.tls import check_pair
from service.http.app import make_app
from service.http.listen import bind, check_exposure, url_of
from service.http.protocol import protocol_class

log = logging.getLogger(__name__)

DEFAULT_PORT = 8000


def run(options: HttpFrontOptions) -> int:
    """Serves until SIGTERM or SIGINT. Prints the ready line. Returns the exit code."""
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    check_exposure(options)
    server = HttpServer(options)
    listener = bind(options, DEFAULT_PORT if options.http_port is None else options.http_port)

    async def serve() -> None:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        print(f"saccade http ready on {url_of(listener, options.tls_cert is not None)}", flush=True)
        await task

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    asyncio.run(serve())
    return 0


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
        self.listening = asyncio.Event()
        """Set once connections are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the server, which then exits with 0; a second one stops it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told)
        yield

    def _told(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
