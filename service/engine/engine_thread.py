"""An engine in this process, for `saccade.LocalClient` and tests: one thread builds it and runs it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from service.common.config import EngineOptions
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.types import EngineInfo, EngineRequest, EventSink, Query


class EngineThread:
    """An engine with the methods of `EngineHandle`. Thread-safe."""

    def __init__(self, options: EngineOptions) -> None:
        """Builds the engine. Raises ConfigError or CheckpointError, both ValueErrors, with a value that would work."""
        self._built: Future[Engine] = Future()
        self._sink: Future[EventSink | None] = Future()
        self._thread = threading.Thread(target=self._main, args=(options,), name="saccade-engine", daemon=True)
        self._thread.start()
        self._engine = self._built.result()
        self.info: EngineInfo = self._engine.info

    def _main(self, options: EngineOptions) -> None:
        try:
            engine = build_engine(options)
        except BaseException as error:  # raised again in the constructor's caller
            self._built.set_exception(error)
            return
        self._built.set_result(engine)
        if (sink := self._sink.result()) is None:
            engine.close()
        else:
            engine.run(sink)

    @property
    def alive(self) -> bool:
        return self._sink.done() and self._engine.alive

    def start(self, on_events: EventSink) -> None:
        """Events are delivered from the engine's thread."""
        self._sink.set_result(on_events)

    def submit(self, request: EngineRequest) -> None:
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def query(self, what: Query) -> Future[dict[str, Any]]:
        return self._engine.query(what)

    def close(self) -> None:
        """Stops after the current step. Idempotent."""
        self._engine.stop()
        if not self._sink.done():
            self._sink.set_result(None)
        self._thread.join()
