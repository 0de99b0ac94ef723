"""The number of threads of computation, and what the log says of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import make_checkpoint

from kernels.cores import Cores
from service.commands import plan as plan_module
from service.commands.plan import plan
from service.common.config import EngineOptions, ServerOptions
from service.engine import threads as threads_module
from service.engine.build import use_processor

MACHINE = Cores(cpus=16, physical=8, quota=3.2, nodes=(0,))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "available_cores", lambda: MACHINE)


def test_one_for_each_core_that_may_be_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        use_processor(EngineOptions(device="cpu"))
    assert torch.get_num_threads() == 3
    assert "computation: 3 threads on 8 cores, 16 hardware threads, a CPU quota of 3.2" in caplog.text
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("threads", [3, 4])
def test_more_than_can_run_are_a_warning(caplog: pytest.LogCaptureFixture, threads: int) -> None:
    use_processor(EngineOptions(device="cpu", threads=threads))
    assert torch.get_num_threads() == threads
    assert ("threads: 4 are more than the 3 that can run at the same time" in caplog.text) == (threads == 4)


def test_the_plan_says_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plan_module, "available_cores", lambda: MACHINE)
    path = str(make_checkpoint(tmp_path, 3, vision=False, text={"pattern": "M"}).path)
    title = plan(ServerOptions(model=path, device="cpu"))[0].title
    assert title.endswith(", 3 threads on 8 cores, 16 hardware threads, a CPU quota of 3.2") and not caplog.text
    assert ", 4 threads on 8 cores" in plan(ServerOptions(model=path, device="cpu", threads=4))[0].title
    assert "threads: 4 are more than the 3" in caplog.text


def test_several_numa_nodes_are_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "available_cores", lambda: Cores(8, 8, None, (1, 3)))
    use_processor(EngineOptions(device="cpu"))
    assert "the NUMA nodes 1, 3" in caplog.text and "numactl --cpunodebind=1 --membind=1" in caplog.text
