"""Runs the HTTP server, for `saccade http` and for the HTTP process of `saccade serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

import uvicorn

from service.common.config import HttpFrontOptions
from service.common.helper_process import STOP_SIGNALS, ignore_stop_signals
from service.http.app import make_app
from service.http.hosts import HostCheck
from service.http.listen import bind, check_exposure, url_of
from service.http.protocol import protocol_class
from service.http.tls import tls_context

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
    ignore_stop_signals()
    return 0


class HttpServer(uvicorn.Server):
    """uvicorn with the limits of `options`, and without its own configuration of logging."""

    def __init__(self, options: HttpFrontOptions, stopped_by: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self.options, self._stopped_by = options, stopped_by
        context = tls_context(options)
        self.app = make_app(options)
        config = uvicorn.Config(
            HostCheck(self.app, self.app.state.front), http=protocol_class(options), ws="none", loop="none",
            log_config=None, access_log=False,
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
        """The signals `stopped_by` stop the server, which then exits with 0; a second one stops it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in self._stopped_by:
            signal.signal(number, self._told)  # not by the loop, which would remove it when it is closed
        yield

    def _told(self, *_: object) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
