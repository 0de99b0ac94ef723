"""The playground in a real browser, Debian's chromium, on a real server with the embedded model.

Skipped where there is no chromium or no Playwright. `make test-web` installs what is missing and passes --whole,
without which tests marked `whole` are skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from fetch_axe import fetch
from keys import key_file
from pages import BUILD, CHROMIUM, ROOT, Playground, launched, opened

from service.commands.server_process import ServerProcess

QUIET = ("--threads", "1", "--image-workers", "1", "--log-level", "warning", "--http-port", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="also run the tests marked `whole`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole", False):
        return
    for item in items:
        if item.get_closest_marker("whole"):
            item.add_marker(pytest.mark.skip(reason="one of the playground's tests that `make test-web` runs"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium: `make test-web` says how to install it")
    pytest.importorskip("playwright", reason="Playwright is not installed: `make test-web` installs it")
    with launched() as browser:
        yield browser


@pytest.fixture(scope="session")
def server(browser: Any) -> Iterator[ServerProcess]:
    """Needs `browser`, so that no server is started for tests that are skipped."""
    with ServerProcess(["demo", "--admin", *QUIET]) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="session")
def locked(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that wants API keys, with a model that reasons first."""
    folder = tmp_path_factory.mktemp("locked")
    shutil.copytree(ROOT / "demo" / "model", folder / "thinker")
    template = folder / "thinker" / "chat_template.jinja"
    template.write_text(template.read_text("utf-8") + "{% if add_generation_prompt %}<think>\n{% endif %}", "utf-8")
    keys = key_file(folder / "keys.toml")
    with ServerProcess([str(folder / "thinker"), "--api-keys", keys, *QUIET]) as running:
        yield running


@pytest.fixture
def desktop(browser: Any, server: ServerProcess) -> Iterator[Playground]:
    with opened(browser, server.http_url) as playground:
        yield playground


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return fetch(BUILD).read_text("utf-8")
