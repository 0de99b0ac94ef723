"""Several fronts over one engine: `saccade serve --fronts N`.

This process, the hub, owns the engine and starts the fronts. Each front listens on the same port, and the kernel deals
the connections out; what a front submits goes through the hub to the engine, and events go back to who submitted. A
front that dies is replaced, and what it had in the engine is aborted; the others do not notice. The hub holds the port
and a file lock, without which a second instance would take part of the connections and nobody would know.

Bounds on what a server holds at a time are divided among the fronts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from service.common.auth import watch_keys
from service.common.channel import Outbox, receive_descriptor
from service.common.config import ConfigError, ServerOptions
from service.common.helper_process import start_helper
from service.engine import wire
from service.engine.supervisor import SupervisedEngine
from service.engine.types import EngineEvent
from service.servers.credentials import server_credentials
from service.servers.exposure import check_exposure
from service.servers.lifetime import stop_signals, until_stopped

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE, STEADY = 0.2, 10.0, 60.0
BEAT_SECONDS = 1.0
"""Between two questions whether a front's event loop still turns."""


@dataclass(eq=False)
class _Front:
    """One process and this side of its connection."""

    member: int
    process: subprocess.Popen[bytes]
    connection: Connection
    serving: Future[int] = field(default_factory=Future)
    started: float = field(default_factory=time.monotonic)
    unanswered: int = 0
    """Questions of the hub since its last answer."""

    def __post_init__(self) -> None:
        self._outbox = Outbox(self.connection)

    def send(self, message: Any) -> None:
        """Does not wait. Nothing happens where it is gone: whoever reads from it notices."""
        self._outbox.put(message)

    def close(self) -> None:
        """Of one whose process has ended."""
        self._outbox.close()
        self.connection.close()


class Hub:
    """The engine, and the fronts around it."""

    def __init__(self, options: ServerOptions, port: int) -> None:
        """Starts the engine. Raises ConfigError."""
        self.port = port
        self._options = options
        self._lock, self._life = threading.Lock(), threading.Lock()
        self._owners: dict[str, tuple[_Front, bytes]] = {}
        self._fronts: dict[int, _Front] = {}
        self._failures: dict[int, int] = {}
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.engine = SupervisedEngine(
            options, log_level=options.log_level, on_change=self._engine_changed,
            on_give_up=self._engine_given_up,
        )  # fmt: skip
        self.engine.start(self._deliver)

    def start(self) -> None:
        """All fronts serve on return. Raises ConfigError with the words of the first that cannot."""
        for member in range(self._options.fronts):
            self._start_front(member)
        try:
            for front in list(self._fronts.values()):
                front.serving.result()
        except ConfigError:
            self._stopping.set()  # what cannot start the first time is not tried again
            raise
        watch = threading.Thread(target=self._watch, name="saccade-front-watch", daemon=True)
        self._threads.append(watch)
        watch.start()

    def _watch(self) -> None:
        """Kills fronts whose event loops have stopped. Counted in waits of this thread and not by the clock: where all
        processes were stopped together and go on, nobody is late."""
        while not self._stopping.wait(BEAT_SECONDS):
            for front in list(self._fronts.values()):
                if not front.serving.done() or front.process.poll() is not None:
                    continue
                if front.unanswered * BEAT_SECONDS > self._options.hang_timeout:
                    log.critical(
                        "front %d has not answered for %g s (hang_timeout): it is killed",
                        front.member, self._options.hang_timeout,
                    )  # fmt: skip
                    front.process.kill()
                front.unanswered += 1
                front.send(("beat",))  # each time: an answer that crosses with the count would else be the last

    def _start_front(self, member: int) -> None:
        with self._life:
            if self._stopping.is_set():
                return
            process, connection = start_helper("service.servers.front_process")
            front = self._fronts[member] = _Front(member, process, connection)
        front.send((share(self._options, member, self.port), self.engine.info, member))
        if not self.engine.alive:
            front.send(("alive", False))
        if self.engine.given_up:
            front.send(("given up",))
        thread = threading.Thread(target=self._read, args=(front,), name=f"saccade-front-{member}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _read(self, front: _Front) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._handle(front, front.connection.recv())
        code = front.process.wait()
        if not front.serving.done():
            front.serving.set_exception(ConfigError(f"front {front.member} ended with code {code} while starting"))
            front.serving.exception()
        with self._lock:
            lost = [name for name, (owner, _) in self._owners.items() if owner is front]
            for name in lost:
                del self._owners[name]
        for name in lost:
            self.engine.abort(name)
        front.close()
        if not self._stopping.is_set():
            log.error(
                "front %d ended by itself (code %d); %d requests of it are dropped", front.member, code, len(lost)
            )
            self._replace(front)

    def _handle(self, front: _Front, message: Any) -> None:
        match message:
            case ("submit", bare):
                descriptors = [receive_descriptor(front.connection) for _ in bare.images]
                with self._lock:
                    self._owners.update((name, (front, bare.salt)) for name in bare.names)
                self.engine.submit_packed(bare, descriptors)
            case ("abort", name):
                with self._lock:
                    self._owners.pop(name, None)
                self.engine.abort(name)
            case ("query", number, what):
                self.engine.query(what).add_done_callback(lambda future: _answer(front, number, future))
            case ("cancel", number, salt, request_id):
                front.send(("answer", number, {"found": self._cancel(salt, request_id)}, None))
            case ("drain",):
                for other in list(self._fronts.values()):
                    other.send(("drain",))
            case ("beat",):
                front.unanswered = 0
            case ("serving", port):
                front.serving.set_result(port)
            case ("failed", words):
                front.serving.set_exception(ConfigError(words))

    def _cancel(self, salt: bytes, request_id: str) -> bool:
        """Ends a request of any front: its front hears what it would have done itself."""
        with self._lock:
            found = [
                (name, owner)
                for name, (owner, theirs) in self._owners.items()
                if theirs == salt and name.partition(":")[2] == request_id
            ]
        for name, owner in found:
            owner.send(("events", wire.pack_events([EngineEvent(name, finish_reason="aborted")])))
        return bool(found)

    def _deliver(self, events: list[EngineEvent]) -> None:
        """On the engine's reader thread: each front gets its own, all of a step at once."""
        parts: dict[_Front, list[EngineEvent]] = {}
        with self._lock:
            for event in events:
                owner = self._owners.get(event.request_id)
                if owner is not None:
                    parts.setdefault(owner[0], []).append(event)
                    if event.finish_reason is not None:
                        del self._owners[event.request_id]
        for front, mine in parts.items():
            front.send(("events", wire.pack_events(mine)))

    def _engine_changed(self, alive: bool) -> None:
        for front in list(self._fronts.values()):
            front.send(("alive", alive))

    def _engine_given_up(self) -> None:
        for front in list(self._fronts.values()):
            front.send(("given up",))

    # -- life ----------------------------------------------------------------------------------------------------------

    def _replace(self, dead: _Front) -> None:
        """On the dead front's own reader thread."""
        if time.monotonic() - dead.started > STEADY:
            self._failures[dead.member] = 0
        failures = self._failures.get(dead.member, 0)
        self._failures[dead.member] = failures + 1
        if not self._stopping.wait(min(FIRST_PAUSE * 2**failures, LONGEST_PAUSE)):
            self._start_front(dead.member)

    async def stop(self, grace: float | None = None) -> None:
        """SIGTERM to all fronts, which end their calls with the grace that they have; a second call hurries them.
        Idempotent."""
        with self._life:
            self._stopping.set()
        for front in self._fronts.values():
            if front.process.poll() is None:
                front.process.send_signal(signal.SIGTERM)
        await asyncio.get_running_loop().run_in_executor(None, self._join)

    def _join(self) -> None:
        for front in list(self._fronts.values()):
            front.process.wait()
        for thread in self._threads:
            thread.join()
        self.engine.close()


def _answer(front: _Front, number: int, future: Future[dict[str, Any]]) -> None:
    error = future.exception()
    front.send(("answer", number, None if error else future.result(), repr(error) if error else None))


def share(options: ServerOptions, member: int, port: int) -> ServerOptions:
    """One front's part of what all may hold together."""

    def part(total: int) -> int:
        return max(1, total // options.fronts)

    metrics = options.metrics_port
    return replace(
        options, port=port, max_queue=part(options.max_queue), max_inflight_bytes=part(options.max_inflight_bytes),
        max_tenant_calls=part(options.max_tenant_calls),
        max_tenant_requests=None if options.max_tenant_requests is None else part(options.max_tenant_requests),
        media_bytes=part(options.media_bytes), image_workers=part(options.image_workers),
        preprocess_bytes=part(options.preprocess_bytes),
        media_tenant_bytes=None if options.media_tenant_bytes is None else part(options.media_tenant_bytes),
        metrics_port=metrics + member if metrics else metrics,
    )  # fmt: skip


def check(options: ServerOptions) -> None:
    """Raises ConfigError for what no front could serve with, and for what several cannot keep."""
    server_credentials(options)
    if options.batch_dir is not None:
        raise ConfigError(
            f"batch_dir: batches are one front's work, and there are to be {options.fronts}; fronts 1 would work"
        )
    if options.sizes_file is not None:
        raise ConfigError(f"sizes_file: written by a server with one front; {options.fronts} are asked for")
    if options.api_keys is not None:
        limited = [t.name for t in watch_keys(options.api_keys).current().values() if t.limits.limited]
        if limited:
            raise ConfigError(
                f"api_keys: {limited[0]!r} has a rate, which {options.fronts} fronts would each count by themselves; "
                "take the rates out, or use fronts 1"
            )


@contextlib.contextmanager
def reserved_port(options: ServerOptions) -> Iterator[int]:
    """Holds the address for the fronts, and keeps other instances off it. Raises ConfigError."""
    family, kind, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as held:
        if options.port:
            path = Path(tempfile.gettempdir()) / f"saccade-{os.getuid()}-{address[0]}-{options.port}.lock"
            try:  # in a folder of everybody's: nobody's link is followed
                lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise ConfigError(f"port: the lock {path} cannot be had: {error.strerror}") from None
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"port: another server has its fronts on {options.host}:{options.port}") from None
        sock = held.enter_context(socket.socket(family, kind))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind(address)  # and never listens: connections go to those that do
        except OSError:
            raise ConfigError(f"port: cannot listen on {options.host}:{options.port}; is it taken?") from None
        yield int(sock.getsockname()[1])


async def serve_fronts(options: ServerOptions) -> int:
    """Runs until SIGTERM or SIGINT; prints the ready line once all fronts serve. Returns the exit code."""
    check_exposure(options)
    check(options)
    loop, stopping = asyncio.get_running_loop(), stop_signals()
    with contextlib.ExitStack() as ends:
        port = ends.enter_context(reserved_port(options))
        if options.media_dir is None:
            media = ends.enter_context(tempfile.TemporaryDirectory(prefix="saccade-media-"))
            options = replace(options, media_dir=media)
        hub = await loop.run_in_executor(None, Hub, options, port)
        try:
            await loop.run_in_executor(None, hub.start)
        except BaseException:
            await hub.stop()
            raise
        log.info("%d fronts on port %d; BatchService is not served by several", options.fronts, port)
        await until_stopped(hub, stopping, options)
    return 0
