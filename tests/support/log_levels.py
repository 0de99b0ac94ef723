"""The log levels of other processes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from waiting import until

TELL_LEVEL = """
import logging, os, signal

def tell(*_):
    try:
        with open(f"{os.path.dirname(__file__)}/{os.getpid()}.new", "w") as file:
            file.write(str(logging.getLogger().level))
        os.replace(file.name, file.name.removesuffix(".new"))
    except OSError:
        pass  # the next signal came meanwhile and was faster

signal.signal(signal.SIGURG, tell)
"""
"""A module that Python imports when it starts: on SIGURG, which others ignore, the process writes its log level to a
file."""


class LogLevels:
    """Processes that are started after this object tell it their log levels."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(TELL_LEVEL)
        monkeypatch.setenv("PYTHONPATH", str(folder))

    def of(self, pid: int) -> int | None:
        """The level of a process; None if it ends meanwhile."""
        file, running = self._folder / str(pid), Path(f"/proc/{pid}/cmdline")
        file.unlink(missing_ok=True)

        def is_told_or_ended() -> bool:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if running.read_bytes():  # a process that its parent has not waited for yet has none
                    os.kill(pid, signal.SIGURG)
                    return file.exists()
            return True

        until(is_told_or_ended)
        return int(file.read_text()) if file.exists() else None
