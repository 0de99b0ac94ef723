"""Structure of the SDK: façade -> core <- transport, and a generated synchronous façade."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SACCADE = Path(__file__).resolve().parents[2] / "saccade"

# The other folders that each folder may import. Only the clients name a transport: they combine it with the methods.
MAY_IMPORT = {
    "_core": set(),
    "_map": {"_core"},
    "_openai": {"_core"},
    "_jobs": {"_core", "_map", "_openai"},
    "_transport": {"_core"},
    "_async": {"_core", "_map", "_jobs"},
    "_sync": {"_core", "_map", "_jobs"},
}
SHARED = {"errors", "types", "v1"}
NEVER = {
    "_core": {"asyncio", "threading", "concurrent", "queue", "socket", "grpc"},
    "_openai": {"asyncio", "threading", "concurrent", "queue", "socket", "grpc"},
    "_jobs": {"asyncio", "threading", "concurrent", "queue", "socket", "grpc"},
    "_async": {"asyncio", "threading", "concurrent", "grpc"},
    "_sync": {"asyncio", "threading", "concurrent", "grpc"},
    "_map": {"grpc"},
    "_transport": set(),
}


def modules(path: Path) -> Iterator[str]:
    """All imports of a file, including those inside functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_follow_the_arrows(folder: str) -> None:
    wrong = []
    for path in sorted((SACCADE / folder).glob("*.py")):
        for module in modules(path):
            top, _, rest = module.partition(".")
            target = rest.partition(".")[0]
            allowed = MAY_IMPORT[folder] | SHARED | {folder}
            if path.name == "client.py" and folder in ("_async", "_sync"):
                allowed.add("_transport")
            if (top == "saccade" and target not in allowed) or top in NEVER[folder]:
                wrong.append(f"{folder}/{path.name} imports {module}")
    assert not wrong


def test_no_two_files_import_each_other() -> None:
    files = {
        ".".join(("saccade", *path.relative_to(SACCADE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in SACCADE.rglob("*.py")
        if "_pb2" not in path.name and "build" not in path.parts
    }
    arrows = {
        name: {
            target
            for module in modules(path)
            for target in (module, module.rpartition(".")[0])
            if target in files and target not in (name, "saccade")
        }
        for name, path in files.items()
    }
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"a cycle among {sorted(arrows)}"


# -- the generated façade ----------------------------------------------------------------------------------------------

_spec = importlib.util.spec_from_file_location("async_to_sync", SACCADE / "tools" / "async_to_sync.py")
assert _spec is not None and _spec.loader is not None
async_to_sync = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = async_to_sync
_spec.loader.exec_module(async_to_sync)


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    fresh = {path.name: path.read_text() for path in async_to_sync.generate(tmp_path)}
    committed = {path.name: path.read_text() for path in (SACCADE / "_sync").glob("*.py")}
    assert fresh.keys() == committed.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, "run `make sdk`"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("async def f():\n    return await g(await h())  # why\n", "def f():\n    return g(h())  # why\n"),
        ("async def f():\n    é = await g('é', await h)\n", "def f():\n    é = g('é', h)\n"),
        ("async def f():\n    async with aclosing(a) as b:\n        return [c async for c in b]\n",
         "def f():\n    with closing(a) as b:\n        return [c for c in b]\n"),
        ("def f() -> AsyncGenerator[dict[str, int], None]: ...\n",
         "def f() -> Generator[dict[str, int], None, None]: ...\n"),
        ("def f(a: Iterable[A] | AsyncIterable[A]): ...\n", "def f(a: Iterable[A]): ...\n"),
        ("class AsyncThing:\n    def __await__(self):\n        return 1\n\n    async def __aexit__(self): ...\n",
         "class Thing:\n\n\n    def __exit__(self): ...\n"),
        ("def f():\n    return a  # sync: return a.now()\n", "def f():\n    return a.now()\n"),
        ("async def f():\n    '''`async for` and `await x`.'''\n", "def f():\n    '''`for` and `x`.'''\n"),
        ("class Asynchronous: ...\n", "class Asynchronous: ...\n"),
    ],
    ids=["comments", "not-ascii", "comprehension", "generator", "union", "classes", "directive", "docstring", "word"],
)  # fmt: skip
def test_what_the_generator_makes(source: str, expected: str) -> None:
    assert async_to_sync.convert(source) == expected


def test_no_method_is_missing_on_either_side() -> None:
    """Their arguments are compared in tests/saccade/test_requests.py."""
    import saccade

    sync, by_asyncio = ({n for n in dir(kind) if n[0] != "_"} for kind in (saccade.Client, saccade.AsyncClient))
    assert sync == by_asyncio and {"generate", "stream", "map", "run_batch", "media", "batches", "close"} <= sync


def test_the_stubs_compare_no_versions() -> None:
    """The required versions are in saccade/pyproject.toml and tested by `make test-floors`."""
    stubs = list((SACCADE / "v1").glob("*_pb2*.py"))
    assert stubs
    for path in stubs:
        text = path.read_text("utf-8")
        assert "runtime_version" not in text and "GRPC_GENERATED_VERSION" not in text, path.name


def test_no_name_of_typing_is_newer_than_python_3_10() -> None:
    """Where newer names are needed, they come from typing_extensions, for type checkers only."""
    newer = {"Self", "Unpack", "Required", "NotRequired", "Never", "assert_never", "LiteralString", "override"}
    wrong = [
        f"{path.name}: {module}"
        for path in SACCADE.rglob("*.py")
        if "_pb2" not in path.name and "build" not in path.parts
        for module in modules(path)
        if module in {f"typing.{name}" for name in newer} | {"enum.StrEnum", "datetime.UTC", "tomllib.tomllib"}
    ]
    assert not wrong
