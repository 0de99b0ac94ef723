"""Signals while a server starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from served import VOCAB, make_served

from service.common.config import ServerOptions
from service.engine.types import EngineRequest
from service.servers import run
from service.servers.lifetime import started


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
