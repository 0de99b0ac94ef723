"""Runs the HTTP server, for `saccade http` and for the HTTP process of `saccade serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from service.common.config import ConfigError, HttpFrontOptions
from service.common.helper_process import STOP_SIGNALS, announce, ignore_stop_signals, log_to_stderr
from service.http.app import make_app
from service.http.hosts import HostCheck
from service.http.listen import SPARE, Listener, bind, check_exposure, url_of
from service.http.protocol import protocol_class
from service.http.tls import servers_tls, tls_context

log = logging.getLogger(__name__)

DEFAULT_PORT = 8000


def run(options: HttpFrontOptions) -> int:
    """Serves until SIGTERM or SIGINT. Prints the ready line. Returns the exit code."""
    log_to_stderr(options.log_level)
    check_exposure(options)
    servers_tls(options)
    if options.max_inflight_bytes < options.max_message_bytes:
        raise ConfigError(
            f"max_inflight_bytes: {options.max_inflight_bytes} bytes hold no body of max_message_bytes "
            f"({options.max_message_bytes}); at least {options.max_message_bytes} would work"
        )

    def ready() -> None:
        announce(f"saccade http ready on {url_of(listener, options.tls_cert is not None)}")

    server = HttpServer(options, ready)
    listener = bind(options, DEFAULT_PORT if options.http_port is None else options.http_port)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    asyncio.run(server.serve(sockets=[listener]))
    ignore_stop_signals()
    return 0


class HttpServer(uvicorn.Server):
    """uvicorn with the limits of `options`, and without its own configuration of logging."""

    def __init__(
        self, options: HttpFrontOptions, ready: Callable[[], None], stopped_by: Sequence[signal.Signals] = STOP_SIGNALS
    ) -> None:
        """`ready`: called once connections are accepted. `stopped_by`: the first of these signals lets running requests
        end, and the server exits with 0; a second one stops it at once. Raises ConfigError."""
        self._ready, self._stopped_by = ready, stopped_by
        context = tls_context(options)
        self.app = make_app(options)
        self._protocol = protocol_class(options)
        config = uvicorn.Config(
            HostCheck(self.app, self.app.state.front), http=self._protocol, ws="none", loop="none",
            log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(options.grace)),
        )  # fmt: skip
        config.load()
        config.ssl = context
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, with a limit on connections in a TLS handshake and on the time of one."""
        assert sockets is not None
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config, options = self.config, self.app.state.front.options
        seconds = None if config.ssl is None else options.http_header_timeout

        def protocol() -> asyncio.Protocol:
            return self._protocol(config, self.server_state, self.lifespan.state)

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol, sock=Listener(each, options.http_max_connections + SPARE), ssl=config.ssl,
                ssl_handshake_timeout=seconds, backlog=config.backlog,
            )
            for each in sockets
        ]  # fmt: skip
        self.started = True
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in self._stopped_by:
            signal.signal(number, self._told)  # not by the loop, which would remove it when it is closed
        yield

    def _told(self, *_: object) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
