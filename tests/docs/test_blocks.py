"""Every code block of README and docs runs, on the server that the quickstart starts, or has a reason why it does
not."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from doc_blocks import CHECKOUT, PAGES, Block, all_blocks, blocks_of, make_folder

GRPC, HTTP = "127.0.0.1:50051", "127.0.0.1:8000"
BLOCKS = all_blocks()
LANGUAGES = {"python", "sh", "json", "yaml", "toml", "text"}
NOT_RUN = {
    "installs packages": 8,
    "other hosts": 8,
    "another program": 4,
    "needs Ray": 2,
    "takes a minute": 1,
}
"""Why a block is not run, and how many blocks may say so. Its options are checked in test_options.py nevertheless."""
MAKE = re.compile(r"(?:make [a-z-]+(?: [A-Z_]+=(?:\"[^\"]*\"|\S+))*\s*(?:#.*)?\n)+")


def command_of(text: str) -> list[str]:
    """The command of a block that starts a server, on free ports, with one thread and one image worker; the encoder's
    graphs are not timed."""
    words = shlex.split(text, comments=True)
    for option in ("--http-port", "--port"):
        if option in words:
            words[words.index(option) + 1] = "0"
    return [*words, "--port", "0", "--threads", "1", "--image-workers", "1", "--graphs", "off", "--log-level", "error"]


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Starts the quickstart's server: the addresses on the page -> those of the server."""
    (block,) = (block for block in BLOCKS if block.page == "docs/quickstart.md" and block.directive == "server")
    process = subprocess.Popen(
        command_of(block.text), stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        lines = [process.stdout.readline() for _ in range(2)]
        found = [re.search(r"ready on (?:http://)?(\S+?)/?$", line.strip()) for line in lines]
        yield {page: match[1] for page, match in zip((GRPC, HTTP), found, strict=True) if match is not None}
        process.terminate()
    assert process.returncode == 0


class Page:
    """The state in which the blocks of one page run: a folder, and the names that its Python blocks have defined."""

    def __init__(self, folder: Path, addresses: dict[str, str]) -> None:
        self.folder = make_folder(folder)
        self._addresses = addresses
        self._names: dict[str, object] = {"__name__": "page"}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "SACCADE_SERVER": addresses[GRPC]}

    def run(self, block: Block) -> None:
        """Runs a block, or reads it if it is data. The test fails where that fails."""
        text = block.text
        for there, here in self._addresses.items():
            text = text.replace(there, here)
        if block.language == "python":
            exec(compile("\n" * block.line + text, block.page, "exec", dont_inherit=True), self._names)
        elif block.language == "sh":
            if MAKE.fullmatch(text):  # the targets exist; what they do is tested elsewhere
                text = re.sub(r"^make", f"make -C {CHECKOUT} --dry-run", text, flags=re.MULTILINE)
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text], cwd=self.folder, env=self._environment, capture_output=True,
                text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, f"{block.where}: {done.stdout}\n{done.stderr}"
        elif block.language == "json":
            json.loads(text)
        elif block.language == "yaml":
            assert list(yaml.safe_load_all(text))
        elif block.language == "toml":
            tomllib.loads(text)

    def close(self) -> None:
        for value in self._names.values():
            if hasattr(value, "with_options"):
                value.close()


@pytest.mark.parametrize("name", sorted({block.page for block in BLOCKS}))
def test_the_blocks_of_a_page_run(
    name: str, addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page(tmp_path, addresses)
    monkeypatch.chdir(page.folder)
    for block in BLOCKS:
        if block.page == name and not block.directive:
            page.run(block)
    page.close()


def test_excerpts_are_in_their_files() -> None:
    excerpts = [block for block in BLOCKS if block.directive == "from"]
    assert excerpts
    for block in excerpts:
        source = (CHECKOUT / block.argument).read_text("utf-8")
        indented = (textwrap.indent(block.text, " " * depth) for depth in (0, 4, 8))
        assert any(text in source for text in indented), f"{block.where} is not in {block.argument}"


def test_blocks_name_their_language() -> None:
    unnamed = [block for block in BLOCKS if block.language not in LANGUAGES]
    assert [block.where for block in unnamed] == []


def test_few_blocks_are_not_run() -> None:
    reasons = [block.argument for block in BLOCKS if block.directive == "not run"]
    assert sorted(set(reasons) - NOT_RUN.keys()) == []
    assert {reason: reasons.count(reason) for reason in NOT_RUN if reasons.count(reason) > NOT_RUN[reason]} == {}
    run = [block for block in BLOCKS if not block.directive and block.language in ("python", "sh")]
    assert len(run) > 2 * len(reasons)


def test_a_block_that_fails_is_noticed(addresses: dict[str, str], tmp_path: Path) -> None:
    page = Page(tmp_path, addresses)
    for language, text in (
        ("python", "1 / 0\n"), ("sh", "false | true\n"), ("json", "{\n"), ("toml", "a\n"), ("yaml", "a: [\n"),
        ("sh", "make no-such-target\n"),
    ):  # fmt: skip
        with pytest.raises((AssertionError, ValueError, ArithmeticError, yaml.YAMLError)):
            page.run(Block("page", 1, language, text))


def test_directives_and_unclosed_fences_are_found() -> None:
    text = "a\n\n<!-- not run: other hosts -->\n```sh\ntrue\n```\n\n```json\n1\n```\n"
    assert blocks_of("p", text) == [
        Block("p", 4, "sh", "true\n", "not run", "other hosts"), Block("p", 8, "json", "1\n"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not closed"):
        blocks_of("p", text + "```sh\n")
    assert all(path.exists() for path in PAGES)
