"""Generates the synchronous façade `saccade/_sync` from the asyncio one, `saccade/_async`.

    python saccade/tools/async_to_sync.py [FOLDER]        default: saccade/_sync

Removes `async` and `await` where the syntax tree has them, leaving the rest of the source including comments unchanged;
then replaces names. Where that is not enough, a comment at the end of a line gives the replacement:

    return stream  # sync: return stream._opened()

After psycopg's tools/async_to_sync.py, which prints the syntax tree instead.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE, TARGET = PACKAGE / "_async", PACKAGE / "_sync"
HEADER = "# Generated from saccade/_async/{name} by `make sdk`. Do not edit.\n"

ONLY_ASYNC = {"__await__"}
"""Functions without a synchronous counterpart."""
NAMES = {
    "saccade._async": "saccade._sync",
    "saccade._transport.aio": "saccade._transport.threads",
    "saccade._map.tasks": "saccade._map.threads",
    "map_requests_async": "map_requests",
    "aclosing": "closing",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    r"\bAsync(?=[A-Z])": "",
}
PHRASES = {
    r"\basync (for|with)\b": r"\1",  # in docstrings; in the code they are gone by now
    r"\bawait ": "",
    r"(Iterable\[\w+\]) \| \1": r"\1",
}
Edit = tuple[int, int, bytes]
"""(start byte, end byte, replacement)."""


def convert(source: str) -> str:
    """The synchronous text of one module."""
    text = re.sub(r"^( *)\S.*# sync: (.*)$", r"\1\2", source, flags=re.MULTILINE)
    data = text.encode()
    for start, end, new in sorted(_edits(data), reverse=True):
        data = data[:start] + new + data[end:]
    text = data.decode()
    for pattern, replacement in (*NAMES.items(), *PHRASES.items()):
        text = re.sub(pattern, replacement, text)
    return text


def _edits(data: bytes) -> Iterator[Edit]:
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.expr | ast.stmt) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.end_lineno - 1] + node.end_col_offset

    tree = ast.parse(data)
    removed = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in ONLY_ASYNC]
    for function in removed:
        yield starts[function.lineno - 1], end(function), b""
    for node in ast.walk(tree):
        if isinstance(node, ast.Await):
            yield begin(node), begin(node.value), b""
        elif isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith):
            yield begin(node), begin(node) + len(b"async "), b""
        elif isinstance(node, ast.comprehension) and node.is_async:
            at = data.rindex(b"async ", 0, begin(node.target))
            yield at, at + len(b"async "), b""
        elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "AsyncGenerator":
            yield end(node) - 1, end(node) - 1, b", None"  # the third parameter of Generator


def generate(target: Path) -> list[Path]:
    """Writes the façade into a folder; returns its files."""
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted(SOURCE.glob("*.py")):
        text = convert(path.read_text("utf-8"))
        written.append(target / path.name)
        written[-1].write_text(HEADER.format(name=path.name) + text, "utf-8")
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(PACKAGE / "pyproject.toml"), "--no-cache", "--quiet"]
    names = [str(path) for path in written]
    subprocess.run([*ruff, "check", "--select", "I,F401", "--fix", *config, *names], check=True)
    subprocess.run([*ruff, "format", *config, *names], check=True)
    return written


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET):
        print(path)
