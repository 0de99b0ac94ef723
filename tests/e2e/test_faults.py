"""A small number of each fault; `make soak` runs larger numbers with the same code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
from running import RunningServer

from service.commands.server_process import ServerProcess


def batch_killed_and_more(model: str, folder: Path) -> Any:
    """All that can happen to one server, whose start takes longer than what happens to it."""

    def then(server: ServerProcess) -> None:
        faults.fill_disk(server, folder, 2)
        faults.stop_under_load(server, 6)

    return faults.batch_killed(model, folder, 200, 1, then=then)


FAULTS: dict[str, Callable[[str, Path], Any]] = {
    "frontend killed": lambda model, folder: faults.frontend_killed(model, 3),
    "slow readers": lambda model, folder: faults.slow_readers(model, 3),
    "clock jump": lambda model, folder: faults.clock_jump(model, folder, 2),
    "certificate rotated": lambda model, folder: faults.certificate_rotated(model, folder, 2),
    "batch killed, disk full, sigterm": batch_killed_and_more,
}
"""test_frontends.py and test_life.py kill engines under streams."""

WITHOUT_IMAGES = {"slow readers", "clock jump", "certificate rotated"}
"""Faults whose requests contain only text: a server whose model takes no images starts in half of the time."""


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, model: Path, text_model: Path, tmp_path: Path) -> None:
    assert FAULTS[name](str(text_model if name in WITHOUT_IMAGES else model), tmp_path)


def test_clients_that_die_leave_nothing(server: RunningServer) -> None:
    assert faults.vanishing_clients(server, 4) == {"clients": 40}


def test_requests_that_nobody_meant(model: Path) -> None:
    with RunningServer(str(model), max_seqs=8, max_len=96) as small:
        assert faults.random_requests(small, 300, seed=1)["requests"] == 300
