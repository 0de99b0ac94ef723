"""The HTTP server of `saccade serve --http-port`: a process of its own, which is replaced if it ends unexpectedly.

It is a client of this server's gRPC services, through Unix sockets in a folder that only this user can open. It passes
API keys on to the gRPC services, which check them. The gRPC server's process owns the listening socket, so that no
connection is refused while the HTTP server is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from service.common.config import ConfigError, HttpFrontOptions, ServerOptions
from service.common.folders import OwnedFolder, temporary
from service.common.helper_process import (
    BEAT_SECONDS,
    POLLS,
    STOP_HELPER,
    HelperFailed,
    log_level,
    restart_pause,
    start_helper,
    until_ready,
)
from service.http.listen import ANY_HOST, bind, check_packages, url_of
from service.servers.exposure import check_exposure

log = logging.getLogger(__name__)

LAST_SECONDS = 1.0
"""Seconds that running requests have at least when the server stops, as those of gRPC have for their last messages."""
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux: unix(7), `sun_path`."""
BASE64 = 4 / 3
"""Images are in base64 in JSON, which makes them longer than in gRPC messages by this factor."""


class HttpProcess:
    """Starts, watches and stops the process. A context manager around the life of the gRPC server."""

    def __init__(self, options: ServerOptions) -> None:
        """Binds the port. Raises ConfigError."""
        assert options.http_port is not None
        check_packages()
        check_exposure(dataclasses.replace(options, host=options.http_host), "http_host")
        self._folder = socket_folder([temporary(), "/tmp"], f"{options.frontends - 1}.sock")
        self._listener = bind(options, options.http_port)
        self.url = url_of(self._listener, options.tls_cert is not None)
        self._options = front_options(options, [f"unix:{self.socket_of(i)}" for i in range(options.frontends)])
        if options.http_file_dir is None:  # uploaded files outlive the process, which may be replaced
            self._options = dataclasses.replace(self._options, http_file_dir=str(Path(self._folder.name) / "files"))
        self._load_timeout, self._hang_timeout = options.load_timeout, options.hang_timeout
        self._life = threading.Lock()
        """Held while a process is started, and while the port is closed."""
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._grpc_address = ""
        self._watch: threading.Thread | None = None
        self.starting: asyncio.Future[None] | None = None

    def socket_of(self, member: int) -> str:
        """The path of the Unix socket of a frontend process."""
        return str(Path(self._folder.name) / f"{member}.sock")

    async def started(self) -> None:
        """Waits until the HTTP server serves. Raises ConfigError if it cannot start. May be cancelled."""
        assert self.starting is not None
        await asyncio.shield(self.starting)

    def tell(self, grpc_address: str) -> None:
        """Tells the process, and those that replace it, where clients reach gRPC; the playground shows it."""
        self._grpc_address = grpc_address
        self.tell_log_level()

    def tell_log_level(self) -> None:
        """Tells the process the log level of this one, which those that replace it are told when they have started, and
        again the address of gRPC, which is part of the same message."""
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the process has ended; the next one is told after its start
                self._connection.send((self._grpc_address, log_level()))

    def start(self) -> None:
        """Starts the process and returns when it serves. Raises ConfigError if it cannot start."""
        connection = self._start()
        watch = threading.Thread(target=self._keep, args=(connection,), name="saccade-http-watch", daemon=True)
        try:
            watch.start()
        except RuntimeError as error:  # no more threads
            raise ConfigError(f"http_port: the HTTP server's process cannot be watched: {error}") from None
        self._watch = watch  # only now: `join` waits for it

    def _start(self) -> Connection:
        with self._life:
            if self._stopping.is_set():
                raise ConfigError("http_port: the server is stopping")
            descriptor = self._listener.fileno()
            try:
                self._process, connection = start_helper("service.http.process", [descriptor])
            except OSError as error:  # for example too many open files, which may pass
                raise ConfigError(f"http_port: the HTTP server's process cannot be started: {error}") from None
        try:
            until_ready(self._process, connection, (self._options, descriptor), self._load_timeout, "HTTP")
        except (HelperFailed, OSError) as error:
            raise ConfigError(f"http_port: {error}") from None
        self._connection = connection
        self.tell_log_level()
        return connection

    def _keep(self, connection: Connection) -> None:
        """Starts another process whenever one ends, after a pause that doubles with each failure to start."""
        failures = 0
        while True:
            assert self._process is not None
            code = self._until_end(self._process, connection)
            connection.close()
            if self._stopping.is_set():
                return
            log.error("the HTTP server ended unexpectedly (code %d); another one is started", code)
            while not self._stopping.wait(restart_pause(failures)):
                try:
                    connection = self._start()
                except ConfigError as error:
                    failures += 1
                    log.error("the HTTP server did not start: %s", error)
                else:
                    failures = 0
                    break
            else:
                return

    def _until_end(self, process: subprocess.Popen[bytes], connection: Connection) -> int:
        """Waits for the end of the process, and returns its exit code. A process whose heartbeats stop is killed."""
        patience = self._hang_timeout + BEAT_SECONDS
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            while any(connection.poll(patience / POLLS) for _ in range(POLLS)):
                connection.recv()
            log.critical("the HTTP server has not answered for %g s (hang_timeout): it is killed", self._hang_timeout)
            process.kill()
        return process.wait()

    def end(self, seconds: float) -> None:
        """Accepts no more connections and stops the process. Running requests may take `seconds`; then it is killed.
        Returns when it has ended. Idempotent."""
        with self._life:
            self._stopping.set()
            self._listener.close()  # else new connections would wait in its queue, although nobody accepts them
        if (process := self._process) is None:
            return
        if seconds and process.poll() is None:
            process.send_signal(STOP_HELPER)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                log.warning("HTTP requests have not ended within %.0f s and are dropped", seconds)
        process.kill()
        process.wait()

    def join(self) -> None:
        """Stops the process if it still runs, and releases its port and folder."""
        self.end(LAST_SECONDS)
        if self._watch is not None:
            self._watch.join()
        self._folder.cleanup()


def socket_folder(parents: Sequence[str], name: str) -> OwnedFolder:
    """A new folder for this user only, in the first of `parents` where a Unix socket called `name` has a path that is
    short enough. Raises ConfigError."""
    refusals = []
    for parent in parents:
        try:
            folder = OwnedFolder("saccade-http-", parent)
        except OSError as error:
            refusals.append(f"{parent}: {error.strerror}")
            continue
        length = len(os.fsencode(f"{folder.name}/{name}"))
        if length <= SOCKET_PATH_BYTES:
            return folder
        folder.cleanup()
        refusals.append(f"{parent}: the socket's path would have {length} bytes, and Linux allows {SOCKET_PATH_BYTES}")
    raise ConfigError(
        f"http_port: no folder for the Unix socket to the HTTP server ({'; '.join(refusals)}); set TMPDIR to a "
        "writable folder with a short path"
    )


@contextlib.asynccontextmanager
async def http_beside(options: ServerOptions) -> AsyncIterator[HttpProcess | None]:
    """The HTTP server of a gRPC server; None if the options ask for none. It starts while the model is loaded, and has
    ended when the context ends. Raises ConfigError."""
    if options.http_port is None:
        yield None
        return
    http = HttpProcess(options)
    loop = asyncio.get_running_loop()
    http.starting = loop.run_in_executor(None, http.start)
    try:
        yield http
    finally:
        if not http.starting.done():
            await loop.run_in_executor(None, http.end, 0.0)
        with contextlib.suppress(ConfigError):
            await http.starting
        await loop.run_in_executor(None, http.join)


def front_options(options: ServerOptions, servers: list[str]) -> HttpFrontOptions:
    """The HTTP server's options: those of the gRPC server that have the same names."""
    names = {field.name for field in dataclasses.fields(HttpFrontOptions)}
    shared = {f.name: getattr(options, f.name) for f in dataclasses.fields(ServerOptions) if f.name in names}
    if not options.http_allowed_hosts and (options.api_keys is not None or options.tls_client_ca is not None):
        # Callers are authenticated, which a page of another origin cannot do.
        shared["http_allowed_hosts"] = (ANY_HOST,)
    shared["max_message_bytes"] = round(options.max_message_bytes * BASE64)
    return HttpFrontOptions(**shared, servers=tuple(servers))
