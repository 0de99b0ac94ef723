"""The frontend's side of the engine process: starts it, sends and receives messages, notices when it ends or hangs, and
starts another.

    EngineLink         the client of an engine at the other end of any connection
    EngineProcess      an EngineLink that also starts and watches the engine's process
    SupervisedEngine   replaces an EngineProcess that has ended: its requests get an error event, and another process is
                       started after a pause that grows with each failure
"""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from service.common.channel import Outbox
from service.common.config import EngineOptions
from service.common.errors import EngineDied
from service.common.helper_process import BEAT_SECONDS, POLLS, HelperFailed, log_level, start_helper, until_ready
from service.engine import wire
from service.engine.types import EngineInfo, EngineRequest, EventSink, Query, error_events

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""Deaths in a row, each within `STEADY` seconds of the engine's start, after which no further engine is started."""
STEADY = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class EngineLink:
    """The client of an engine at the other end of a connection, with the methods of `service.engine.engine.Engine`.
    Thread-safe."""

    info: EngineInfo

    def __init__(self, connection: Connection, on_death: Callable[[], None] = lambda: None) -> None:
        """`on_death` is called once, from the reader thread, if the connection ends without `close`."""
        self._connection = connection
        self._on_death = on_death
        self._outbox = Outbox(connection, self._lost)
        self._state_lock = threading.Lock()
        self._live: set[str] = set()
        self._queries: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = count()
        self._emit: EventSink = lambda events: None
        self._closing = False
        self._reader: threading.Thread | None = None

    def start(self, on_events: EventSink) -> None:
        """Events are delivered from the reader thread."""
        self._emit = on_events
        reader = threading.Thread(target=self._read, name="saccade-engine-reader", daemon=True)
        reader.start()
        self._reader = reader

    def submit(self, request: EngineRequest) -> None:
        """Sends the request. If the engine is dead, or there is no memory for the patches, the request gets an error
        event."""
        try:
            bare, descriptors = request.packed()
        except OSError as error:
            message = f"no shared memory for the request's images: {error.strerror}"
            self._emit(error_events(request.names, "full", message))
            return
        self.submit_packed(bare, descriptors)

    def submit_packed(self, bare: EngineRequest, descriptors: Sequence[int]) -> None:
        """Sends what `EngineRequest.packed` made of a request. Takes ownership of the descriptors."""
        with self._state_lock:
            self._live.update(bare.names)
        self._outbox.put(("submit", bare), descriptors, numbers=bare.numbers)

    def abort(self, request_id: str) -> None:
        with self._state_lock:
            self._live.discard(request_id)
        self._outbox.put(("abort", request_id))

    def query(self, what: Query) -> Future[dict[str, Any]]:
        return self._ask("query", what)

    def _ask(self, kind: str, *arguments: Any) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_running_or_notify_cancel()  # cannot be cancelled: answering it would then raise in the reader
        number = next(self._numbers)
        with self._state_lock:
            self._queries[number] = future
        self._outbox.put((kind, number, *arguments))
        return future

    def _lost(self, message: Any) -> None:
        """A message could not be sent: the other side has ended."""
        if message[0] == "submit":
            self._lose(list(message[1].names))
        else:
            self._fail_queries()

    def _read(self) -> None:
        try:
            while True:
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            pass
        except Exception:  # for example, no memory for a message; requests would wait for further ones forever
            log.exception("a message of the engine cannot be processed")
            self._give_up()
        self._ended()
        with self._state_lock:
            lost = sorted(self._live)
        self._lose(lost)
        self._fail_queries()
        if not self._closing:
            self._on_death()

    def _handle(self, message: Any) -> None:
        match message:
            case ("events", packed):
                events = wire.unpack_events(packed)
                with self._state_lock:
                    self._live.difference_update(e.request_id for e in events if e.finish_reason)
                self._emit(events)
            case ("answer", number, value, error):
                with self._state_lock:
                    future = self._queries.pop(number, None)
                if future is None:
                    return
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(AssertionError(error))
            case other:
                self._other(other)

    def _give_up(self) -> None:
        """Ends the other side, whose messages are no longer read."""

    def _ended(self) -> None:
        """Called when the other side has ended."""

    def _other(self, message: Any) -> None:
        """Handles a message that is neither events nor an answer."""
        raise ValueError(f"no such message: {message!r:.80}")

    def _lose(self, request_ids: list[str]) -> None:
        with self._state_lock:
            lost = [r for r in request_ids if r in self._live]
            self._live.difference_update(lost)
        if lost:
            self._emit(error_events(lost, "died", "the engine stopped"))

    def _fail_queries(self) -> None:
        with self._state_lock:
            queries, self._queries = list(self._queries.values()), {}
        for future in queries:
            future.set_exception(EngineDied("the engine stopped"))


class EngineProcess(EngineLink):
    """An engine in a process of its own. It is killed when it does not answer a heartbeat within `hang_timeout`."""

    def __init__(
        self, options: EngineOptions, *, on_death: Callable[[], None] = lambda: None,
        on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
    ) -> None:  # fmt: skip
        """Starts the process and waits until its model is loaded. Raises ConfigError with the engine's message if it
        rejects the options, and EngineDied if it ends while loading or takes longer than `load_timeout`. `on_death` is
        called once, from the reader thread, if the process ends without `close`; `on_start` with the process before its
        model is loaded."""
        self._process, connection = start_helper("service.servers.engine_process")
        on_start(self._process)
        super().__init__(connection, on_death)
        self._hang_timeout = options.hang_timeout
        self._over = threading.Event()
        self._log_level = log_level()
        first = options, self._log_level
        try:
            (self.info,) = until_ready(self._process, connection, first, options.load_timeout, "engine")
        except HelperFailed as error:
            raise EngineDied(str(error)) from None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and not self._closing

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, on_events: EventSink) -> None:
        # First, so that an engine without this thread has no reader either, which would report its end.
        threading.Thread(target=self._watch, name="saccade-engine-watch", daemon=True).start()
        super().start(on_events)

    def _watch(self) -> None:
        """Sends new log levels of this process, and heartbeats that the engine's loop answers. Kills an engine that
        does not answer one within `hang_timeout`; its end is then handled like any other."""
        while not self._over.wait(BEAT_SECONDS):
            if (level := log_level()) != self._log_level:
                self._log_level = level
                self._outbox.put(("log level", level))
            beat = self.query("beat")
            for _ in range(POLLS):
                if wait([beat], self._hang_timeout / POLLS).done or self._over.is_set():
                    break
            else:
                log.critical(
                    "the engine has not finished a step for %g s (hang_timeout): it is killed",
                    self._hang_timeout,
                )
                self._process.kill()
                return

    def close(self) -> None:
        """Ends the process, by SIGKILL if it does not answer. Idempotent."""
        self._closing = True
        self._over.set()
        self._outbox.put(("close",))
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            log.warning("the engine process did not stop; it is killed")
            self._process.kill()
            self._process.wait()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._outbox.close()
        with self._state_lock:  # a second signal closes it from another thread, while the first one is here
            self._connection.close()

    def _give_up(self) -> None:
        self._process.kill()

    def _ended(self) -> None:
        self._over.set()
        code = self._process.wait()
        if not self._closing:
            log.error("the engine process ended by itself (code %d)", code)


class Loading:
    """The first process that loads a model for a server, which a signal may end before there is a server. Thread-safe:
    `end` may come before `begins`."""

    def __init__(self) -> None:
        self._ended, self._over = threading.Event(), False
        self._process: subprocess.Popen[bytes] | None = None

    def begins(self, process: subprocess.Popen[bytes]) -> None:
        """Called when a process begins to load a model. No effect after `over`."""
        if not self._over:
            self._process = process
            if self._ended.is_set():
                process.kill()

    def over(self) -> None:
        """Called when the model is loaded: `end` has no effect from here on."""
        self._over, self._process = True, None

    def end(self) -> None:
        """Kills the process, now or as soon as it is started."""
        self._ended.set()
        if (process := self._process) is not None:
            process.kill()


class SupervisedEngine:
    """An `EngineProcess` that is replaced when it dies, with the same methods. Thread-safe."""

    def __init__(self, options: EngineOptions, *, loading: Loading | None = None) -> None:
        """Starts the first engine; its ConfigError is raised. With `loading` another thread can end the first engine
        while it loads its model; EngineDied is raised then."""
        self._options = options
        self.on_change: Callable[[bool], None] = lambda alive: None
        """Called from other threads with whether there is an engine. Like `on_give_up`, not before `start`."""
        self.on_give_up: Callable[[], None] = lambda: None
        """Called from another thread when no further engine will be started."""
        self._emit: EventSink = lambda events: None
        self._closing, self._first = threading.Event(), loading or Loading()
        self._deaths = 0
        self.restarts = 0
        self.given_up = False
        """Whether no further engine will be started."""
        self._started = time.monotonic()
        self._restarter: threading.Thread | None = None
        self._loading: subprocess.Popen[bytes] | None = None
        self._change = threading.Lock()
        """Held from a change of the engine until it has been told, so that changes are told in order."""
        self._engine = self._new_engine()
        self.info: EngineInfo = self._engine.info

    def _new_engine(self) -> EngineProcess:
        engine = EngineProcess(self._options, on_death=self._died, on_start=self._loads)
        self._first.over()
        self._loading = None
        return engine

    def _loads(self, process: subprocess.Popen[bytes]) -> None:
        """Called when an engine begins to load its model, which may take minutes."""
        self._loading = process
        self._first.begins(process)
        if self._closing.is_set():
            process.kill()

    @property
    def alive(self) -> bool:
        return self._engine.alive

    @property
    def pid(self) -> int:
        """Process id of the present engine."""
        return self._engine.pid

    def start(self, on_events: EventSink) -> None:
        self._emit = on_events
        self._engine.start(on_events)

    def submit(self, request: EngineRequest) -> None:
        self._engine.submit(request)

    def submit_packed(self, bare: EngineRequest, descriptors: Sequence[int]) -> None:
        self._engine.submit_packed(bare, descriptors)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def query(self, what: Query) -> Future[dict[str, Any]]:
        return self._engine.query(what)

    def close(self) -> None:
        """Ends the engine and the attempts to replace it, without waiting for a model to be loaded. Idempotent."""
        self._closing.set()
        if (loading := self._loading) is not None:
            loading.kill()
        if self._restarter is not None:
            self._restarter.join()
        self._engine.close()

    def _died(self) -> None:
        """Called on the dead engine's reader thread, after its requests got their error events."""
        with self._change:  # the thread that has started it may not have told yet that there is an engine
            self.on_change(False)
        if time.monotonic() - self._started > STEADY:
            self._deaths = 0
        while not self._closing.is_set():
            restarter = threading.Thread(target=self._restart, name="saccade-supervisor", daemon=True)
            try:
                restarter.start()
            except RuntimeError as error:  # no more threads, which may pass
                log.error("the engine cannot be started again yet: %s", error)
                self._closing.wait(FIRST_PAUSE)
            else:
                self._restarter = restarter
                return

    def _restart(self) -> None:
        dead = self._engine
        while self._deaths < MAX_RESTARTS:
            pause = min(FIRST_PAUSE * 2**self._deaths, LONGEST_PAUSE)
            self._deaths += 1
            if self._closing.wait(pause):
                return
            try:
                engine = self._new_engine()
            except Exception as error:  # the cause may be temporary
                if self._closing.is_set():
                    return
                self._failed(error)
                continue
            self._started = time.monotonic()
            with self._change:
                try:
                    engine.start(self._emit)  # before it gets requests, whose errors would otherwise be lost
                except RuntimeError as error:  # no more threads
                    self._failed(error)
                    engine.close()
                    continue
                self._engine = engine
                self.restarts += 1
                dead.close()
                log.warning("the engine runs again, as process %d", engine.pid)
                self.on_change(True)
            return
        log.critical("the engine died %d times in a row; it is not started again", self._deaths)
        self.given_up = True
        self.on_give_up()

    def _failed(self, error: Exception) -> None:
        log.error("the engine did not start again (attempt %d of %d): %s", self._deaths, MAX_RESTARTS, error)
