"""Options that would start more processes than the machine's memory holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from service.common.config import ConfigError, ServerOptions
from service.servers.process_memory import PROCESS_BYTES, check_process_memory

MEMORY = 2 * 30 * PROCESS_BYTES
"""A machine whose half holds 30 processes."""


@pytest.mark.parametrize(("frontends", "workers"), [(1, 2), (10, 2), (10, 20), (1, 29), (4, 26)])
def test_what_fits_is_accepted(frontends: int, workers: int) -> None:
    check_process_memory(ServerOptions(frontends=frontends, image_workers=workers), MEMORY)


@pytest.mark.parametrize(
    ("frontends", "workers", "message"),
    [
        (11, 2, "frontends: 11 processes, .* 7200 MiB of memory of .*; at most 10 fit"),
        (10**9, 2, "frontends: 1000000000 processes, .*; at most 10 fit"),
        (1, 30, "image_workers: 30 processes of 120 MiB .* 7200 MiB of memory of .*; at most 29 fit"),
        (4, 27, "image_workers: 27 .*; at most 26 fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_number_that_does(frontends: int, workers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_process_memory(ServerOptions(frontends=frontends, image_workers=workers), MEMORY)


def test_a_small_machine_runs_one_frontend_with_its_workers() -> None:
    check_process_memory(ServerOptions(), PROCESS_BYTES)
    with pytest.raises(ConfigError, match="at most 1 fit"):
        check_process_memory(ServerOptions(frontends=2), PROCESS_BYTES)


@pytest.mark.parametrize("option", [["--frontends", "100000"], ["--image-workers", "100000"]])
def test_a_server_with_too_many_does_not_begin_to_start_them(option: list[str]) -> None:
    command = [sys.executable, "-m", "service", "serve", "--port", "0", *option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{option[0][2:].replace('-', '_')}: 100000 processes" in done.stderr
