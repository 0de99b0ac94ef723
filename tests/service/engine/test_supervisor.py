"""How often and after which pauses a dead engine is tried again, with engines that start and die as they are told."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from threads import scarce_threads

from service.common.config import EngineOptions
from service.engine import engine_client
from service.engine.engine_client import SupervisedEngine


class Engine:
    """The part of `EngineProcess` that a supervisor uses."""

    info = None
    outcomes: list[bool] = []
    """Of the starts to come: whether each succeeds."""
    starts: list[float] = []
    made: list[Engine] = []

    def __init__(self, options: Any, *, on_death: Callable[[], None], on_start: Any) -> None:
        Engine.starts.append(time.monotonic())
        if not (Engine.outcomes.pop(0) if Engine.outcomes else True):
            raise OSError("it does not start")
        self.die, self.alive, self.sink, self.closed = on_death, True, None, False
        self.dying = threading.Thread()
        self.pid = len(Engine.starts)
        Engine.made.append(self)

    def start(self, sink: Any) -> None:
        self.sink = sink

    def close(self) -> None:
        self.closed = True


class Watched:
    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, outcomes: list[bool], steady: float = 60.0,
        kind: type[Engine] = Engine,
    ) -> None:  # fmt: skip
        for name, value in (("EngineProcess", kind), ("FIRST_PAUSE", 0.02), ("LONGEST_PAUSE", 0.05),
                            ("MAX_RESTARTS", 3), ("STEADY", steady)):  # fmt: skip
            monkeypatch.setattr(engine_client, name, value)
        Engine.outcomes, Engine.starts, Engine.made = [True, *outcomes], [], []
        self.told: list[object] = []
        self.change = threading.Condition()
        self.engine = SupervisedEngine(EngineOptions())
        self.engine.on_change, self.engine.on_give_up = self._tell, lambda: self._tell("given up")
        self.engine.start(lambda events: None)

    def _tell(self, what: object) -> None:
        with self.change:
            self.told.append(what)
            self.change.notify_all()

    def until(self, *told: object) -> None:
        with self.change:
            assert self.change.wait_for(lambda: len(self.told) >= len(told), 30) and self.told == list(told)


def test_a_dead_engine_is_replaced_and_its_sink_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, outcomes=[False, True])
    first = Engine.made[0]
    first.die()
    watched.until(False, True)
    second = Engine.made[1]
    assert watched.engine.pid == second.pid and second.sink is first.sink and first.closed and not second.closed
    assert watched.engine.restarts == 1 and not watched.engine.given_up
    pauses = [b - a for a, b in zip(Engine.starts, Engine.starts[1:], strict=False)]
    assert pauses[0] >= 0.02 and pauses[1] >= 0.04
    watched.engine.close()
    assert second.closed


def test_an_engine_that_dies_at_once_is_told_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else health would say that there is an engine until the next one has loaded its model."""

    class DiesAtOnce(Engine):
        def start(self, sink: Any) -> None:
            super().start(sink)
            if self.pid == 2:
                self.dying = threading.Thread(target=self.die)
                self.dying.start()

        def close(self) -> None:
            super().close()
            if len(Engine.made) == 2 and self.pid == 1:
                Engine.made[1].dying.join(0.2)  # ends before, unless it waits for what has to be told first

    watched = Watched(monkeypatch, outcomes=[True, True], kind=DiesAtOnce)
    Engine.made[0].die()
    watched.until(False, True, False, True)
    assert watched.engine.pid == 3
    watched.engine.close()


def test_deaths_in_a_row_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts that fail and engines that die at once count alike."""
    watched = Watched(monkeypatch, outcomes=[True, False, False])
    Engine.made[0].die()
    watched.until(False, True)
    Engine.made[1].die()
    watched.until(False, True, False, "given up")
    assert len(Engine.starts) == 4 and watched.engine.given_up and watched.engine.restarts == 1
    watched.engine.close()


def test_an_engine_that_has_run_for_long_begins_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, outcomes=[True] * 6, steady=0.0)
    expected: list[object] = []
    for number in range(5):
        Engine.made[number].die()
        expected += [False, True]
        watched.until(*expected)
    assert watched.engine.restarts == 5 and not watched.engine.given_up
    watched.engine.close()


def test_nothing_is_started_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, outcomes=[True])
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 30.0)
    monkeypatch.setattr(engine_client, "LONGEST_PAUSE", 30.0)
    Engine.made[0].die()
    watched.until(False)
    watched.engine.close()
    assert len(Engine.starts) == 1 and Engine.made[0].closed and watched.told == [False]


def test_a_lack_of_threads_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the thread that starts another engine, and for those that read what it sends."""

    class Unread(Engine):
        def start(self, sink: Any) -> None:
            if self.pid == 2:
                raise RuntimeError("can't start new thread")
            super().start(sink)

    watched = Watched(monkeypatch, outcomes=[True, True], kind=Unread)
    with scarce_threads(monkeypatch, "saccade-supervisor", 2):
        Engine.made[0].die()
        watched.until(False, True)
    assert watched.engine.pid == 3 and [engine.closed for engine in Engine.made] == [True, True, False]
    watched.engine.close()


def test_an_engine_that_dies_without_a_thread_that_watches_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on processes and threads may end the engine too."""
    made: list[subprocess.Popen[bytes]] = []

    def start(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
        near, far = socket.socketpair()
        with near, far:
            Connection(os.dup(far.fileno())).send(("ready", None))
            made.append(subprocess.Popen(["sleep", "600"], pass_fds=[far.fileno()]))
            return made[-1], Connection(os.dup(near.fileno()))

    plain = threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        if thread.name == "saccade-engine-watch" and len(made) == 2:
            made[1].kill()
            for reader in threading.enumerate():
                if reader.name == "saccade-engine-reader":  # one that sees the end
                    reader.join(1.0)
            raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(engine_client, "start_helper", start)
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.02)
    engine, runs = SupervisedEngine(EngineOptions()), threading.Event()
    engine.on_change = lambda alive: runs.set() if alive else None
    engine.start(lambda events: None)
    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", start_thread)
        made[0].kill()
        assert runs.wait(10) and engine.pid == made[2].pid
    made[2].kill()
    engine.close()
