"""An engine without a model: every live request gets one token per step, as fast as the frontend takes them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from service.engine.types import EngineEvent, EngineInfo, EngineRequest, EventSink, Query


class FakeEngine:
    """The methods of `service.engine.engine.EngineHandle`."""

    def __init__(self, *, vocabulary: int, max_len: int = 100_000, model: str = "demo") -> None:
        self.info = EngineInfo(model, "fake", max_len, 1024, 10_000, "float32")
        self.loop: asyncio.AbstractEventLoop | None = None
        """The frontend's, with which the engine keeps pace."""
        self._vocabulary = vocabulary
        self._incoming: deque[tuple[str, Any]] = deque()
        self._live: dict[str, list[int]] = {}
        self._wake, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._paused = threading.Semaphore(4)
        """Number of steps by which the engine may be ahead of the frontend. Without a bound, the queue would grow and
        memory would be measured instead of the frontend."""

    @property
    def alive(self) -> bool:
        return not self._closing

    def start(self, on_events: EventSink) -> None:
        self._emit = on_events
        self._thread.start()

    def _run(self) -> None:
        token = 0
        while not self._closing:
            while self._incoming:
                name, limit = self._incoming.popleft()
                if limit is None:
                    self._live.pop(name, None)
                else:
                    self._live[name] = [0, limit]
            if not self._live:
                self._wake.wait()
                self._wake.clear()
                continue
            events = []
            for name, state in list(self._live.items()):
                state[0] += 1
                token = (token + 1) % self._vocabulary
                last = state[0] == state[1]
                events.append(EngineEvent(name, token, finish_reason="length" if last else None))
                if last:
                    del self._live[name]
            self._paused.acquire()
            self._emit(events)
            self._release_when_taken()

    def _release_when_taken(self) -> None:
        """The frontend's loop runs callbacks in order, so the frontend has taken the previous step when this one
        runs."""
        if self.loop is None:
            self._paused.release()
        else:
            self.loop.call_soon_threadsafe(self._paused.release)

    def submit(self, request: EngineRequest) -> None:
        for name in request.names:
            self._incoming.append((name, request.sampling.max_tokens or 16))
        self._wake.set()

    def abort(self, request_id: str) -> None:
        self._incoming.append((request_id, None))
        self._wake.set()

    def query(self, what: Query) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_result({"live": len(self._live), "decoder": {}, "encoder": {}, "handoff": {}})
        return future

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
