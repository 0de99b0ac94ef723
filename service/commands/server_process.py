"""A server as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from service.common.config import ConfigError
from service.common.helper_process import python_path

EXIT_SECONDS = 120.0
"""Seconds that a server that could not start has to end."""


class ServerProcess:
    """A `saccade serve` of this checkout, on a free port unless one is given, for the demo, benchmarks and tests."""

    def __init__(self, arguments: Sequence[str] = (), *, port: int = 0) -> None:
        """Returns when the server is ready. Raises ConfigError if it ends before."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "service", "serve", *arguments, "--port", str(port)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip
        self.address = self._line_after("saccade ready on ", "the server")
        self.http_url = ""
        if "--http-port" in arguments:
            self.http_url = self._line_after("saccade http ready on ", "the HTTP server")

    def _line_after(self, words: str, what: str) -> str:
        """Reads the line that begins with `words`, which says that `what` is ready; returns the rest of it. Raises
        ConfigError if there is none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(words):
            code = self._process.wait(EXIT_SECONDS)
            raise ConfigError(f"{what} did not start (exit code {code}); its log says why")
        return line.removeprefix(words).strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """Waits until the server ends, by itself or by Ctrl-C, which the terminal sends to it too. Returns the exit
        code."""
        return self._process.wait()

    def stop(self) -> int:
        """SIGTERM, then wait. Returns the exit code. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
        code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
