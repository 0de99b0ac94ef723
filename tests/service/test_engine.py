"""The engine's loop over a tiny model: what becomes of requests that the decoder refuses, and of several samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import make_served

from decoder.sampling import SamplingParams
from service import errors
from service.build import build_engine
from service.config import EngineOptions
from service.engine import Engine, EngineEvent, EngineRequest
from service.frontend import _engine_error


class Running:
    """An engine in a thread of its own, and what it has said."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.events = engine, list[EngineEvent]()
        self._told = threading.Condition()
        self._thread = threading.Thread(target=engine.run, args=(self._hear,))
        self._thread.start()

    def _hear(self, events: list[EngineEvent]) -> None:
        with self._told:
            self.events += events
            self._told.notify_all()

    def wait(self, names: set[str]) -> dict[str, list[EngineEvent]]:
        """Events by request, once all of these have ended."""
        with self._told:
            ended = self._told.wait_for(
                lambda: names <= {e.request_id for e in self.events if e.finish_reason is not None}, timeout=60
            )
        assert ended, f"{names} have not ended"
        return {name: [e for e in self.events if e.request_id == name] for name in names}

    def close(self) -> None:
        self.engine.query("integrity").result(60)
        self.engine.stop()
        self._thread.join()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    make_served(tmp_path / "model", vision=False)
    engine = build_engine(EngineOptions(str(tmp_path / "model"), dtype="float32", threads=1, max_seqs=4, max_len=200))
    running = Running(engine)
    yield running
    running.close()


def greedy(tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def test_a_deadline_out_of_reach_is_refused_and_leaves_nothing(running: Running) -> None:
    """A step has taken a thousand seconds: what has five left is not begun."""
    running.engine._decoder.pace.observe(1, 1000.0)
    running.engine.submit(EngineRequest("late", [1] * 50, greedy(), timeout=5.0))
    (event,) = running.wait({"late"})["late"]
    assert event.error == "deadline" and "50 prompt tokens" in event.message
    status = _engine_error(event)
    assert isinstance(status, errors.DeadlineExceeded) and status.reason == "DEADLINE_UNREACHABLE"
    running.engine.submit(EngineRequest("patient", [1] * 50, greedy()))
    assert len(running.wait({"patient"})["patient"]) == 4
