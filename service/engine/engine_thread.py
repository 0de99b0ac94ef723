"""An engine in this process, for `saccade.LocalClient` and tests: one thread builds it and runs it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from service.common.config import EngineOptions
from service.common.errors import EngineDied
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.types import EngineInfo, EngineRequest, EventSink, Query


class EngineThread:
    """An engine with the methods of `EngineHandle`. Thread-safe."""

    def __init__(self, options: EngineOptions) -> None:
        """Builds the engine. Raises ConfigError or CheckpointError, both ValueErrors, with a value that would work."""
        built: Future[Engine] = Future()
        self._sink: Future[EventSink | None] = Future()
        self._thread = threading.Thread(
            target=_build_and_run, args=(options, built, self._sink), name="saccade-engine", daemon=True
        )
        self._thread.start()
        self._engine: Engine | None = built.result()
        """None once it is closed, so that its memory does not live as long as this object."""
        self.info: EngineInfo = self._engine.info

    @property
    def alive(self) -> bool:
        engine = self._engine
        return engine is not None and self._sink.done() and engine.alive

    def start(self, on_events: EventSink) -> None:
        """Events are delivered from the engine's thread."""
        self._sink.set_result(on_events)

    def submit(self, request: EngineRequest) -> None:
        if (engine := self._engine) is not None:
            engine.submit(request)

    def abort(self, request_id: str) -> None:
        if (engine := self._engine) is not None:
            engine.abort(request_id)

    def query(self, what: Query) -> Future[dict[str, Any]]:
        if (engine := self._engine) is not None:
            return engine.query(what)
        failed: Future[dict[str, Any]] = Future()
        failed.set_exception(EngineDied("the engine is closed"))
        return failed

    def close(self) -> None:
        """Stops after the current step and frees the engine's memory. Idempotent."""
        if self._engine is not None:
            self._engine.stop()
        if not self._sink.done():
            self._sink.set_result(None)
        self._thread.join()
        self._engine = None


def _build_and_run(options: EngineOptions, built: Future[Engine], sink: Future[EventSink | None]) -> None:
    """The thread's work. An error while building is raised again in the constructor's caller."""
    try:
        engine = build_engine(options)
    except BaseException as error:
        built.set_exception(error)
        return
    built.set_result(engine)
    if (on_events := sink.result()) is None:
        engine.close()
    else:
        engine.run(on_events)
