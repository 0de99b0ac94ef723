"""The code blocks of README and docs, and the folder in which they run."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
IMAGES = CHECKOUT / "demo" / "pictures"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"<!-- (server|not run|from)(?:: (.*?))? -->\n\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    `directive` is the comment on the line before it: `<!-- server -->`, a command that runs until it is stopped;
    `<!-- not run: REASON -->`; `<!-- from: FILE -->`, an excerpt of a source file.
    """

    page: str
    line: int
    language: str
    text: str
    directive: str = ""
    argument: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page's text. ValueError for a fence that is not closed."""
    found = []
    for fence in _FENCE.finditer(text):
        mark = _DIRECTIVE.search(text[: fence.start()])
        directive, argument = (mark[1], mark[2] or "") if mark else ("", "")
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence[1], fence[2], directive, argument))
    if len(re.findall(r"^```", text, re.MULTILINE)) != 2 * len(found):
        raise ValueError(f"{page}: a fence of a code block is indented or not closed")
    return found


def all_blocks() -> list[Block]:
    """The blocks of README, CONTRIBUTING and docs, in order."""
    return [
        block for path in PAGES for block in blocks_of(path.relative_to(CHECKOUT).as_posix(), path.read_text("utf-8"))
    ]


def make_folder(folder: Path) -> Path:
    """Fills a folder with what pages expect: the checkout's files, three images, and two files of requests."""
    (folder / ".venv").symlink_to(sys.prefix)  # the environment of these tests, wherever it is
    for name in ("Makefile", "benchmarks", "deploy", "examples", "protos"):
        (folder / name).symlink_to(CHECKOUT / name)
    shutil.copytree(IMAGES, folder / "demo" / "pictures")
    for name, shipped in (("image.png", "shapes.png"), ("a.png", "pair-first.png"), ("b.png", "pair-second.png")):
        shutil.copy(IMAGES / shipped, folder / name)
    text = {"type": "text", "text": "What does the picture show?"}
    image = {"type": "image_url", "image_url": {"url": "image.png"}}
    for name, content in (("in.jsonl", [image, text]), ("text.jsonl", [text])):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
        (folder / name).write_text(json.dumps({"custom_id": "1", "body": body}) + "\n")
    return folder
