"""Signals while a server starts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from served import VOCAB, make_served

from service.common.config import ServerOptions
from service.engine.types import EngineRequest
from service.servers import run
from service.servers.http_process import http_beside
from service.servers.lifetime import started, until_stopped


def test_a_start_that_a_signal_ends() -> None:
    async def main() -> None:
        stopping, ended = asyncio.Event(), []

        async def start() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        waiting = asyncio.create_task(started(start(), stopping))
        await asyncio.sleep(0)
        stopping.set()
        assert await waiting is False and ended == [True]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_start_that_ends_by_itself() -> None:
    async def good() -> None:
        await asyncio.sleep(0)

    async def bad() -> None:
        raise ValueError("no")

    async def main() -> None:
        assert await started(good(), asyncio.Event()) is True
        with pytest.raises(ValueError, match="no"):
            await started(bad(), asyncio.Event())

    asyncio.run(main())


@pytest.fixture
def slow_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helper processes that take longer to start than any test."""
    program = tmp_path / "slow"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("slow_helpers")
def test_a_signal_does_not_wait_for_the_start_of_the_http_server(capsys: pytest.CaptureFixture[str]) -> None:
    options = ServerOptions(http_port=0, load_timeout=30.0)

    class Serving:
        port, stops = 50051, 0

        async def stop(self, grace: float | None = None) -> None:
            self.stops += 1

    async def main() -> None:
        stopping, server = asyncio.Event(), Serving()
        async with asyncio.timeout(15):
            async with http_beside(options) as http:  # while the model is loaded
                assert http is not None
            async with http_beside(options) as http:
                serving = asyncio.create_task(until_stopped(server, stopping, options, http))
                while "saccade ready" not in capsys.readouterr().out:
                    await asyncio.sleep(0)
                stopping.set()
                await serving
        assert server.stops == 1

    asyncio.run(main())
    assert "http ready" not in capsys.readouterr().out


def test_a_signal_ends_a_server_that_warms_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step may take minutes, in which kernels are compiled."""
    model = str(make_served(tmp_path / "model", vision=False).path)
    engines: list[Silent] = []

    class Silent(FakeEngine):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(vocabulary=VOCAB)
            self.asked = asyncio.Event()
            engines.append(self)

        def submit(self, request: EngineRequest) -> None:
            self.asked.set()

    monkeypatch.setattr(run, "SupervisedEngine", Silent)

    async def main() -> int:
        stopping = asyncio.Event()
        monkeypatch.setattr(run, "stop_signals", lambda: stopping)
        async with asyncio.timeout(60):
            serving = asyncio.create_task(run.serve(ServerOptions(model=model, port=0, dtype="float32")))
            while not engines:
                await asyncio.sleep(0.01)
            await engines[0].asked.wait()
            stopping.set()
            return await serving

    assert asyncio.run(main()) == 0 and not engines[0].alive
