"""The link to an encoder process, with stand-ins for the process and for the owner."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from service.common.config import EngineOptions
from service.encoding import process_link
from service.encoding.encoder_pool import Link
from service.encoding.entries import Work
from service.encoding.process_link import ProcessLink


class Owner:
    def __init__(self) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def written(self, link: Link, work: Work, counts: tuple[int, ...]) -> None: ...

    def failed(self, link: Link, work: Work, error: Exception) -> None: ...

    def lost(self, link: Link, works: Sequence[Work], reason: str) -> None:
        self.told.put(reason)

    def changed(self, link: Link) -> None:
        self.told.put("changed")


def test_a_message_that_cannot_be_processed_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would read its further messages, and images would never be encoded again."""
    processes: list[subprocess.Popen[bytes]] = []
    connections: list[Connection] = []

    def start(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        processes.append(subprocess.Popen(["sleep", "600"]))
        connections.append(Connection(theirs.detach()))
        connections[-1].send(("ready",))
        return processes[-1], Connection(ours.detach())

    monkeypatch.setattr(process_link, "start_helper", start)
    monkeypatch.setattr(process_link, "END_SECONDS", 0.0)
    owner: Any = Owner()
    link = ProcessLink(EngineOptions(), segment_bytes=1 << 16)
    link.start(owner)
    try:
        connections[0].send_bytes(b"no message")
        assert owner.told.get(timeout=60) == f"the encoder process ended with code {-signal.SIGKILL}"
        assert owner.told.get(timeout=60) == "changed" and link.alive and link.pid == processes[1].pid
    finally:
        for connection in connections:
            connection.close()
        link.close()
