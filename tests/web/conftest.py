"""The playground in a real browser, Debian's chromium, on a real server with the demo model.

Skipped where there is no chromium or no Playwright. `make test-web` installs what is missing and runs everything;
without SACCADE_WEB=1, which it sets, only the tests that are not marked `whole` run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build" / "web"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("whole") and not os.environ.get("SACCADE_WEB"):
            item.add_marker(pytest.mark.skip(reason="make test-web runs it"))


class WebServer:
    """`saccade serve` with its HTTP server, on free ports."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "service", "serve", *arguments, "--port", "0", "--http-port", "0", "--threads", "1",
             "--log-level", "warning", "--image-workers", "1"],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self._process.stdout is not None
        lines = [self._process.stdout.readline().split() for _ in range(2)]
        assert all(lines), f"the server did not start: exit code {self._process.wait(30)}"
        self.url = next(line[-1] for line in lines if "http" in line)
        self.grpc = next(line[-1] for line in lines if "http" not in line)

    def close(self) -> None:
        self._process.terminate()
        code = self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert code == 0


@pytest.fixture(scope="session")
def server() -> Iterator[WebServer]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    running = WebServer("demo", "--admin")
    yield running
    running.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as engine:
        # Root, as in containers, has no sandbox.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    from fetch_axe import fetch

    return fetch(BUILD).read_text("utf-8")
