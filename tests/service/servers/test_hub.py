"""The hub of several frontend processes, with stand-ins for these and for the engine."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
from threads import scarce_threads
from waiting import until

from decoder.sampling import SamplingParams
from service.common.config import ServerOptions
from service.engine.types import EngineRequest
from service.servers import frontends
from service.servers.frontends import Hub, serve_frontends


class Engine:
    """The part of `SupervisedEngine` that a hub uses."""

    info, given_up = None, False

    def __init__(self, options: Any, *, loading: Any) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.closed = False

    @property
    def alive(self) -> bool:
        return True

    def start(self, sink: Any) -> None:
        pass

    def submit_packed(self, bare: EngineRequest, descriptors: Sequence[int]) -> None:
        self.submitted += bare.names

    def abort(self, name: str) -> None:
        self.aborted.append(name)

    def close(self) -> None:
        self.closed = True


class Frontends:
    """Processes that do nothing, and the test's ends of the hub's connections to them."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.serve = True
        """Whether they say at once that they serve."""

    def start(self, module: str) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        process, connection = subprocess.Popen(["sleep", "600"]), Connection(theirs.detach())
        self.connections.append(connection)
        self.processes.append(process)
        if self.serve:
            connection.send(("serving", 50051))
        return process, Connection(ours.detach())

    def close(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            process.kill()
            connection.close()


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontends]:
    members = Frontends()
    monkeypatch.setattr(frontends, "start_helper", members.start)
    monkeypatch.setattr(frontends, "SupervisedEngine", Engine)
    yield members
    members.close()


@pytest.fixture
def hub(members: Frontends) -> Iterator[Hub]:
    hub = Hub(ServerOptions(frontends=1), 50051)
    yield hub
    hub._stopping.set()
    members.close()  # the hub reads until its connections end
    asyncio.run(hub.stop(grace=0))
    assert hub.engine.closed  # type: ignore[attr-defined]


def test_a_frontend_whose_message_cannot_be_processed_is_replaced(hub: Hub, members: Frontends) -> None:
    """Its requests are aborted. Nothing would read its messages, and nothing notice its end."""
    engine: Any = hub.engine
    hub.start()
    members.connections[0].send(("submit", EngineRequest("a", [1], SamplingParams(max_tokens=1))))
    until(lambda: engine.submitted == ["a"])
    members.connections[0].send_bytes(b"no message")
    until(lambda: len(members.processes) == 2)
    assert members.processes[0].returncode == -signal.SIGKILL and engine.aborted == ["a"]
    members.connections[1].send(("submit", EngineRequest("b", [1], SamplingParams(max_tokens=1))))
    until(lambda: engine.submitted == ["a", "b"])
    assert members.processes[1].poll() is None


def test_a_frontend_without_a_thread_that_reads_is_started_again(
    hub: Hub, members: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.start()
    with scarce_threads(monkeypatch, "saccade-frontend-0", 1):
        members.processes[0].kill()
        members.connections[0].close()
        until(lambda: len(members.processes) == 3)
    assert members.processes[1].returncode == -signal.SIGKILL
    engine: Any = hub.engine
    members.connections[2].send(("submit", EngineRequest("a", [1], SamplingParams(max_tokens=1))))
    until(lambda: engine.submitted == ["a"])


def test_a_new_frontend_is_told_last_what_is_true(hub: Hub, members: Frontends) -> None:
    """An engine that runs again just after the hub has seen that there is none."""

    class Returns(Engine):
        @property
        def alive(self) -> bool:
            if not hub._frontends:
                return True
            telling = threading.Thread(target=hub._engine_changed, args=(True,))
            telling.start()
            telling.join(0.2)  # ends before, unless it waits for the hub
            return False

    hub.engine.__class__ = Returns
    hub.start()
    told = [members.connections[0].recv() for _ in range(3)][1:]
    assert told == [("alive", False), ("alive", True)]


def test_a_signal_ends_a_server_whose_frontends_are_starting(
    members: Frontends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take as long as `load_timeout` allows, an hour by default."""
    members.serve = False

    async def main() -> int:
        stopping = asyncio.Event()
        monkeypatch.setattr(frontends, "stop_signals", lambda: stopping)
        serving = asyncio.create_task(serve_frontends(ServerOptions(frontends=2, port=0)))
        try:
            async with asyncio.timeout(10):
                while len(members.processes) < 2:
                    await asyncio.sleep(0.01)
                members.connections[0].send(("serving", 50051))
                stopping.set()
                while any(process.poll() is None for process in members.processes):
                    await asyncio.sleep(0.01)
        finally:
            members.close()
        return await serving

    assert asyncio.run(main()) == 0
    assert [process.returncode for process in members.processes] == [-signal.SIGUSR1] * 2
