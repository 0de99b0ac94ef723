"""The options and commands that pages mention exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from doc_blocks import CHECKOUT, PAGES

from saccade.cli import main

COMMANDS = ("ask", "batch", "top", "serve", "http", "demo", "plan", "quantize", "convert", "tune", "key", "probe")
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]+)")
FOREIGN = {
    "build-arg", "stop-timeout", "entrypoint", "cpus", "cpuset-cpus", "cpuset-mems",  # docker
    "cpunodebind", "membind",  # numactl
    "variant", "include", "isolation", "pull-never",  # debootstrap, buildah
    "show", "stat", "format",  # git
    "local-dir",  # hf download
    "version",  # saccade itself
    "model-args", "tasks",  # lm-eval
    "worker-urls", "mm-processing", "policy", "strict", "check",  # smg, mkdocs, ruff
}  # fmt: skip


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The options of all commands and benchmarks."""
    found = set(FOREIGN)
    for command in (*([name] for name in COMMANDS), ["plan", "--replicas"]):
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
            main([*command, "--help"])
        found |= set(FLAG.findall(told.getvalue()))
    for path in (CHECKOUT / "benchmarks").rglob("*.py"):
        found |= set(re.findall(r"\"--([a-z][a-z0-9-]+)\"", path.read_text("utf-8")))
    return found


@pytest.mark.parametrize("page", [path for path in PAGES if path.name != "log.md"], ids=lambda path: path.name)
def test_every_option_of_a_page_exists(page: Path, known: set[str]) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text("utf-8"))
    named = {name for name in FLAG.findall(text) if not name.endswith("-")}  # `--max-video-...` stands for several
    unknown = {name for name in named if name not in known and f"no-{name}" not in known}
    assert not unknown
