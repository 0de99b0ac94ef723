"""Several frontend processes over one engine process: `saccade serve --frontends N`.

This process, the hub, owns the engine and starts the frontend processes. All of them listen on the same port
(SO_REUSEPORT) and the kernel distributes the connections. The hub forwards requests from the frontends to the engine
and events back to the frontend that submitted the request. A frontend that dies is replaced and its requests in the
engine are aborted; the other frontends continue. The hub binds the port and holds a file lock for it: without them, a
second server on the same port would silently receive part of the connections.

Limits on what a server holds at a time are divided among the frontends, except those on uploaded files, whose folder
they share.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from service.common.channel import Outbox, receive_descriptors
from service.common.config import ConfigError, ServerOptions
from service.common.folders import OwnedFolder, locked, temporary
from service.common.helper_process import BEAT_SECONDS, STOP_HELPER, log_level, restart_pause, start_helper
from service.common.option import cannot_listen
from service.engine import wire
from service.engine.engine_client import Loading, SupervisedEngine
from service.engine.types import EngineEvent
from service.servers.http_process import HttpProcess, http_beside
from service.servers.lifetime import started, stop_signals, unless_stopped, until_stopped

log = logging.getLogger(__name__)

STEADY = 60.0
"""Seconds after which a frontend that ends has not failed in a row with those before it."""
END_SECONDS = 10.0
"""Seconds that a frontend has to exit after the grace period for running calls; then it is killed."""


@dataclass(eq=False)
class _Frontend:
    """A frontend process and the hub's end of the connection to it."""

    member: int
    process: subprocess.Popen[bytes]
    connection: Connection
    serving: Future[int] = field(default_factory=Future)
    started: float = field(default_factory=time.monotonic)
    waits: int = 0
    """How often the watching thread has waited since the process was started or last answered."""

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.connection)
        self._lock, self._closed = threading.Lock(), False
        self._numbers = count()
        self._asked: dict[int, Future[bool]] = {}

    def send(self, message: Any) -> None:
        """Queues a message without blocking. Does nothing if the process has ended: the reader thread notices that."""
        self._outbox.put(message)

    def cancel(self, salt: bytes, request_id: str) -> Future[bool]:
        """Asks the process to cancel a request. The result is whether it had the request; False if it ends first."""
        future: Future[bool] = Future()
        with self._lock:
            if self._closed:
                future.set_result(False)
                return future
            number = next(self._numbers)
            self._asked[number] = future
        self.send(("cancel", number, salt, request_id))
        return future

    def cancelled(self, number: int, found: bool) -> None:
        """Takes the process's answer to `cancel`."""
        with self._lock:
            future = self._asked.pop(number)
        future.set_result(found)

    def close(self) -> None:
        """Closes the connection; the process must have ended."""
        self._outbox.close()
        self.connection.close()
        with self._lock:
            self._closed, asked = True, list(self._asked.values())
        for future in asked:
            future.set_result(False)


class Hub:
    """Owns the engine and the frontend processes, and forwards messages between them."""

    def __init__(
        self, options: ServerOptions, port: int, http: HttpProcess | None = None, loading: Loading | None = None
    ) -> None:
        """Starts the engine. Raises ConfigError, and EngineDied if `loading` ends the engine while it loads."""
        self.port = port
        self._http = http
        self._options = options
        self._lock, self._life = threading.Lock(), threading.Lock()
        self._change = threading.Lock()
        """Held while frontends are told whether there is an engine, so that a new one hears it in order, too."""
        self._owners: dict[str, _Frontend] = {}
        self._frontends: dict[int, _Frontend] = {}
        self._failures: dict[int, int] = {}
        self._stopping = threading.Event()
        self._draining = False
        self._threads: list[threading.Thread] = []
        self.engine = SupervisedEngine(options, loading=loading)
        self.engine.on_change, self.engine.on_give_up = self._engine_changed, self._engine_given_up
        self.engine.start(self._deliver)

    def start(self) -> None:
        """Starts all frontends and returns when they serve. Raises ConfigError with the message of the first that
        fails."""
        for member in range(self._options.frontends):
            self._start_frontend(member)
        watch = threading.Thread(target=self._watch, name="saccade-frontend-watch", daemon=True)
        watch.start()
        self._threads.append(watch)
        try:
            for frontend in list(self._frontends.values()):
                frontend.serving.result()
        except ConfigError:
            self._stopping.set()  # a first start that fails is not retried
            raise

    def _watch(self) -> None:
        """Kills frontends that take too long to start or whose event loops have stopped. Time is counted in waits of
        this thread and not by the clock, so that nothing is killed after all processes were suspended and resumed
        together."""
        while not self._stopping.wait(BEAT_SECONDS):
            for frontend in list(self._frontends.values()):
                if frontend.process.poll() is not None:
                    continue
                serving = frontend.serving.done()
                name = "hang_timeout" if serving else "load_timeout"
                limit: float = getattr(self._options, name)
                if frontend.waits * BEAT_SECONDS > limit:
                    log.critical(
                        "frontend %d has not answered for %g s (%s) and is killed", frontend.member, limit, name
                    )
                    frontend.process.kill()
                frontend.waits += 1
                if serving:  # even if a heartbeat is unanswered: its answer may have come just before `waits` rose
                    frontend.send(("beat", log_level()))

    def _start_frontend(self, member: int) -> None:
        with self._life:
            if self._stopping.is_set():
                return
            process, connection = start_helper("service.servers.frontend_process")
            frontend = _Frontend(member, process, connection)
            private_socket = None if self._http is None else self._http.socket_of(member)
            frontend.send((share(self._options, member, self.port), self.engine.info, member, private_socket))
            with self._change:
                self._frontends[member] = frontend  # from here on other threads send to it
                if not self.engine.alive:
                    frontend.send(("alive", False))
        if self.engine.given_up:
            frontend.send(("given up",))
        if self._draining:
            frontend.send(("drain",))
        thread = threading.Thread(target=self._read, args=(frontend,), name=f"saccade-frontend-{member}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: nobody would read its messages
            process.kill()
            process.wait()
            frontend.close()
            raise
        self._threads.append(thread)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _read(self, frontend: _Frontend) -> None:
        try:
            while True:
                self._handle(frontend, frontend.connection.recv())
        except (EOFError, ConnectionError):
            pass
        except Exception:  # for example, too many open files for an image; its requests would wait forever
            log.exception("a message of frontend %d cannot be processed: it is killed", frontend.member)
            frontend.process.kill()
        code = frontend.process.wait()
        if not frontend.serving.done():
            frontend.serving.set_exception(
                ConfigError(f"frontend {frontend.member} ended with code {code} while starting")
            )
        with self._lock:
            lost = [name for name, owner in self._owners.items() if owner is frontend]
            for name in lost:
                del self._owners[name]
        for name in lost:
            self.engine.abort(name)
        frontend.close()
        if not self._stopping.is_set():
            log.error(
                "frontend %d ended unexpectedly (code %d); its %d requests are lost", frontend.member, code, len(lost)
            )
            self._replace(frontend)

    def _handle(self, frontend: _Frontend, message: Any) -> None:
        match message:
            case ("submit", bare):
                descriptors = receive_descriptors(frontend.connection, len(bare.images))
                with self._lock:
                    self._owners.update(dict.fromkeys(bare.names, frontend))
                self.engine.submit_packed(bare, descriptors)
            case ("abort", name):
                with self._lock:
                    self._owners.pop(name, None)
                self.engine.abort(name)
            case ("query", number, what):
                self.engine.query(what).add_done_callback(lambda future: frontend.send(wire.answer(number, future)))
            case ("cancel", number, salt, request_id):
                others = [other for other in list(self._frontends.values()) if other is not frontend]
                self._cancel(frontend, number, (salt, request_id), others)
            case ("cancelled", number, found):
                frontend.cancelled(number, found)
            case ("log level", level):  # the other frontends and the engine get it with their heartbeats
                logging.getLogger().setLevel(level)
                if self._http is not None:
                    self._http.tell_log_level()
            case ("drain",):
                self._draining = True
                for other in list(self._frontends.values()):
                    other.send(("drain",))
            case ("beat",):
                frontend.waits = 0
            case ("serving", port):
                frontend.waits = 0
                frontend.serving.set_result(port)
            case ("failed", words):
                frontend.serving.set_exception(ConfigError(words))

    def _cancel(self, asker: _Frontend, number: int, request: tuple[bytes, str], others: Sequence[_Frontend]) -> None:
        """Asks `others` one after the other to cancel a request, and tells the one that asked whether it was found. A
        request that is still being prepared is known only to its own frontend."""
        if not others:
            asker.send(("answer", number, {"found": False}, None))
            return

        def asked(found: Future[bool]) -> None:
            if found.result():
                asker.send(("answer", number, {"found": True}, None))
            else:
                self._cancel(asker, number, request, others[1:])

        others[0].cancel(*request).add_done_callback(asked)

    def _deliver(self, events: list[EngineEvent]) -> None:
        """Sends each frontend its events, all of one step in one message. Runs on the engine's reader thread."""
        parts: dict[_Frontend, list[EngineEvent]] = {}
        with self._lock:
            for event in events:
                owner = self._owners.get(event.request_id)
                if owner is not None:
                    parts.setdefault(owner, []).append(event)
                    if event.finish_reason is not None:
                        del self._owners[event.request_id]
        for frontend, mine in parts.items():
            frontend.send(("events", wire.pack_events(mine)))

    def _engine_changed(self, alive: bool) -> None:
        with self._change:
            for frontend in list(self._frontends.values()):
                frontend.send(("alive", alive))

    def _engine_given_up(self) -> None:
        for frontend in list(self._frontends.values()):
            frontend.send(("given up",))

    # -- life ----------------------------------------------------------------------------------------------------------

    def _replace(self, dead: _Frontend) -> None:
        """Starts a frontend in place of a dead one, after a pause that doubles with each failure. Runs on the dead
        one's reader thread."""
        if time.monotonic() - dead.started > STEADY:
            self._failures[dead.member] = 0
        failures = self._failures.get(dead.member, 0)
        self._failures[dead.member] = failures + 1
        while not self._stopping.wait(restart_pause(failures)):
            try:
                self._start_frontend(dead.member)
                return
            except (OSError, RuntimeError) as error:  # for example too many open files or threads, which may pass
                failures += 1
                log.error("frontend %d cannot be started: %s", dead.member, error)

    async def stop(self, grace: float | None = None) -> None:
        """Sends `STOP_HELPER` to all frontends, which let running calls end within `options.grace`; a second call makes
        them end at once. A frontend that does not end is killed `END_SECONDS` after `grace`, by default
        `options.grace`. Returns when all have ended and the engine is closed. Idempotent; may be cancelled and called
        again."""
        with self._life:
            self._stopping.set()
        for frontend in self._frontends.values():
            if frontend.process.poll() is None:
                frontend.process.send_signal(STOP_HELPER)
        seconds = (self._options.grace if grace is None else grace) + END_SECONDS
        await asyncio.get_running_loop().run_in_executor(None, self._join, seconds)

    def _join(self, seconds: float) -> None:
        """Waits until all frontends have ended, then closes the engine. Kills frontends that still run after
        `seconds`."""
        deadline = time.monotonic() + seconds
        for frontend in list(self._frontends.values()):
            try:
                frontend.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                log.error("frontend %d did not end within %g s and is killed", frontend.member, seconds)
                frontend.process.kill()
                frontend.process.wait()
        for thread in self._threads:
            thread.join()
        self.engine.close()


def share(options: ServerOptions, member: int, port: int) -> ServerOptions:
    """The options of one frontend: limits of the whole server are divided by the number of frontends, except those of
    the media folder, which all frontends share."""

    def part(total: int) -> int:
        return max(1, total // options.frontends)

    metrics = options.metrics_port
    return replace(
        options, port=port, max_queue=part(options.max_queue), max_inflight_bytes=part(options.max_inflight_bytes),
        max_tenant_calls=part(options.max_tenant_calls),
        max_tenant_requests=None if options.max_tenant_requests is None else part(options.max_tenant_requests),
        image_workers=part(options.image_workers), preprocess_bytes=part(options.preprocess_bytes),
        image_cache_bytes=options.image_cache_bytes // options.frontends,
        metrics_port=metrics + member if metrics else metrics,
    )  # fmt: skip


@contextlib.contextmanager
def reserved_port(options: ServerOptions) -> Iterator[int]:
    """Binds the port for the frontends, and keeps other servers off it until the context ends; yields the port. Raises
    ConfigError if the port is taken."""
    family, kind, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as held:
        if options.port:
            path = Path(temporary()) / f"saccade-{os.getuid()}-{address[0]}-{options.port}.lock"
            try:  # O_NOFOLLOW: every user can create links in this folder
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise ConfigError(f"port: the lock file {path} cannot be opened: {error.strerror}") from None
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"port: another server's frontends listen on {options.host}:{options.port}; choose another port"
                ) from None
        sock = held.enter_context(socket.socket(family, kind))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind(address)  # without listen(): connections go only to the frontends, which listen
        except OSError as error:
            raise cannot_listen("host", "port", options.host, options.port, error) from None
        yield int(sock.getsockname()[1])


async def serve_frontends(options: ServerOptions) -> int:
    """Runs until SIGTERM or SIGINT; prints the ready line once all frontends serve. Returns the exit code."""
    stopping = stop_signals()
    async with contextlib.AsyncExitStack() as ends:
        http = await ends.enter_async_context(http_beside(options))
        port = ends.enter_context(reserved_port(options))
        if options.media_dir is None:
            options = replace(options, media_dir=ends.enter_context(OwnedFolder("saccade-media-")))
        else:
            ends.enter_context(locked(Path(options.media_dir), "media_dir"))
        hub = await unless_stopped(partial(Hub, options, port, http), stopping)
        if hub is None:
            return 0
        try:
            ready = await started(asyncio.to_thread(hub.start), stopping)
        except BaseException:
            await hub.stop()
            raise
        if not ready:
            await hub.stop(grace=0)
            return 0
        log.info("%d frontends on port %d; BatchService is off, because it needs frontends 1", options.frontends, port)
        await until_stopped(hub, stopping, options, http)
    return 0
