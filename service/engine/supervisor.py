"""Keeps an engine running: when it dies, its requests get an error event, and another is started after a pause that
grows with each failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from service.common.config import EngineOptions
from service.engine.engine_client import EngineProcess
from service.engine.types import EngineInfo, EngineRequest, EventSink, Query

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""Deaths in a row, each within `STEADY` seconds of the engine's start, after which no further engine is started."""
STEADY = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class SupervisedEngine:
    """An `EngineProcess` that is replaced when it dies, with the same methods. Thread-safe."""

    def __init__(
        self, options: EngineOptions, *, log_level: str = "info",
        on_change: Callable[[bool], None] = lambda alive: None, on_give_up: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Starts the first engine; its ConfigError is raised. `on_change` is called from other threads with whether
        there is an engine, and `on_give_up` when no further engine will be started."""
        self._options, self._log_level, self._on_change = options, log_level, on_change
        self._on_give_up = on_give_up
        self._emit: EventSink = lambda events: None
        self._closing = threading.Event()
        self._deaths = 0
        self.restarts = 0
        self.given_up = False
        """Whether no further engine will be started."""
        self._started = time.monotonic()
        self._restarter: threading.Thread | None = None
        self._engine = self._new_engine()
        self.info: EngineInfo = self._engine.info

    def _new_engine(self) -> EngineProcess:
        return EngineProcess(self._options, log_level=self._log_level, on_death=self._died)

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
        """Ends the engine and the attempts to replace it. Idempotent."""
        self._closing.set()
        if self._restarter is not None:
            self._restarter.join()
        self._engine.close()

    def _died(self) -> None:
        """Called on the dead engine's reader thread, after its requests got their error events."""
        self._on_change(False)
        if time.monotonic() - self._started > STEADY:
            self._deaths = 0
        self._restarter = threading.Thread(target=self._restart, name="saccade-supervisor", daemon=True)
        self._restarter.start()

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
                log.error("the engine did not start again (attempt %d of %d): %s", self._deaths, MAX_RESTARTS, error)
                continue
            self._started = time.monotonic()
            self._engine = engine
            self.restarts += 1
            engine.start(self._emit)
            dead.close()
            log.warning("the engine runs again, as process %d", engine.pid)
            self._on_change(True)
            return
        log.critical("the engine died %d times in a row; it is not started again", self._deaths)
        self.given_up = True
        self._on_give_up()
