"""Rules about the whole tree, one test each: which package may import which, and that generated files are up to
date."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("saccade", "service", "families", "encoder", "decoder", "kernels")

# What each package may import of the others, and whether torch and transformers are within its reach.
MAY_IMPORT = {
    "saccade": set(),
    "service": {"families", "encoder", "decoder", "kernels", "saccade.v1"},
    "families": {"encoder", "decoder", "kernels"},
    "encoder": {"kernels"},
    "decoder": {"kernels"},
    "kernels": set(),
}
# The SDK's doors to the server, opened when called; and the demo command, which is a client of the server it
# starts.
EXCEPTIONS = {
    ("saccade/_transport/local.py", "service"),
    ("saccade/ray/serve.py", "service"),
    ("saccade/cli.py", "service"),
    ("service/commands/demo.py", "saccade"),
    # One table of gRPC's target names, one rule for the size and the depth of JSON, and one for data URLs.
    ("service/common/option.py", "saccade"),
    ("service/answers/json_values.py", "saccade"),
    ("service/rpc/media_urls.py", "saccade"),
    # A batch on the server is the client's own job over a client that has no wire: one set of rules for both.
    ("service/batches/batches.py", "saccade"),
    ("service/batches/batch_runs.py", "saccade"),
    ("service/servers/server.py", "saccade"),
    # The HTTP server uses the SDK.
    *((path.relative_to(CHECKOUT).as_posix(), "saccade") for path in (CHECKOUT / "service" / "http").glob("*.py")),
}
METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)
PROTOCOLS = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"}
NEVER = {
    "saccade": {"torch", "transformers", "tokenizers", "triton"},
    "service": {"transformers"},
    "families": {"transformers", "asyncio"} | PROTOCOLS,
    "encoder": {"transformers", "asyncio"} | PROTOCOLS,
    "decoder": {"transformers", "asyncio"} | PROTOCOLS,
    "kernels": {"transformers", "asyncio"} | PROTOCOLS,
}


def sources(package: str) -> list[Path]:
    build = CHECKOUT / package / "build"  # created by `pip install`
    found = (CHECKOUT / package).rglob("*.py")
    chosen = sorted(path for path in found if "_pb2" not in path.name and not path.is_relative_to(build))
    assert chosen, f"{package} has no files, so that every rule would hold"
    return chosen


@dataclass(frozen=True)
class Source:
    """What the rules ask about a file. Its syntax tree is not kept: those of all files slow the garbage collector."""

    imports: tuple[tuple[str, bool], ...]
    """Each module that the file imports, and whether that happens when the file itself is imported."""
    imports_from: tuple[ast.ImportFrom, ...]
    classes: tuple[tuple[str, int], ...]
    """The names of all classes, with their numbers of methods."""


@functools.cache
def parsed(path: Path) -> Source:
    tree = ast.parse(path.read_text("utf-8"))
    nodes = list(ast.walk(tree))
    return Source(
        tuple(_imports(path, tree)),
        tuple(node for node in nodes if isinstance(node, ast.ImportFrom)),
        tuple(
            (node.name, sum(isinstance(part, METHODS) for part in node.body))
            for node in nodes
            if isinstance(node, ast.ClassDef)
        ),
    )


def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Each module that the file imports, and whether that happens when the file itself is imported."""
    return parsed(path).imports


def _imports(path: Path, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    package = ".".join(path.relative_to(CHECKOUT).with_suffix("").parts[:-1])

    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                name = child.module or ""
                if child.level:
                    name = importlib.util.resolve_name("." * child.level + name, package)
                # `from saccade import v1` names a module too.
                yield from ((f"{name}.{alias.name}", top) for alias in child.names)
            elif isinstance(child, ast.If) and any(
                "TYPE_CHECKING" in (getattr(part, "id", ""), getattr(part, "attr", "")) for part in ast.walk(child.test)
            ):
                yield from walk(ast.Module(child.orelse, []), top)
            else:
                yield from walk(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from walk(tree, True)


def within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    wrong = []
    for path in sources(package):
        name = path.relative_to(CHECKOUT).as_posix()
        for module, _ in imports(path):
            top = module.partition(".")[0]
            ours = top in {*PACKAGES, "demo", "tests", "benchmarks"} and top != package
            allowed = any(within(module, target) for target in MAY_IMPORT[package]) or (name, top) in EXCEPTIONS
            if (ours and not allowed) or top in NEVER[package]:
                wrong.append(f"{name} imports {module}")
    assert not wrong


@pytest.mark.parametrize("package", ["service", "encoder", "families", "kernels"])
def test_no_two_files_import_each_other(package: str) -> None:
    """By any kind of import, including those for type checkers."""
    files = {
        ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources(package)
    }
    arrows = {
        name: {
            target
            for node in parsed(path).imports_from
            if not node.level
            for target in (f"{node.module}.{alias.name}" for alias in node.names)
            for target in (target if target in files else target.rpartition(".")[0],)
            if target in files and target != name
        }
        for name, path in files.items()
    }
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"a cycle among {sorted(arrows)}"


# Packages of service/, each of which may import those before it.
SERVER_PACKAGES = (
    "common", "telemetry", "model", "media", "encoding", "engine", "answers", "batches", "rpc", "http", "servers",
    "commands",
)  # fmt: skip


def test_packages_of_the_server_import_one_way() -> None:
    found = {path.name for path in (CHECKOUT / "service").iterdir() if (path / "__init__.py").exists()}
    assert found == set(SERVER_PACKAGES)
    wrong = []
    for path in sources("service"):
        package = path.relative_to(CHECKOUT / "service").parts[0]
        if package not in SERVER_PACKAGES:
            continue
        for node in parsed(path).imports_from:
            if not within(node.module or "", "service"):
                continue
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for target in {name.split(".")[1] for name in names if name and "." in name}:
                if target in SERVER_PACKAGES and SERVER_PACKAGES.index(target) > SERVER_PACKAGES.index(package):
                    wrong.append(f"{path.relative_to(CHECKOUT)} imports {target}")
    assert not wrong


def test_only_their_packages_know_transports() -> None:
    """Everything below `rpc` serves any transport; `encoding` is a client of other hosts."""
    wrong = [
        f"{path.relative_to(CHECKOUT)} imports {module}"
        for package in SERVER_PACKAGES[: SERVER_PACKAGES.index("rpc")]
        if package != "encoding"
        for path in sources(f"service/{package}")
        for module, _ in imports(path)
        if module.partition(".")[0].startswith("grpc")
    ]
    assert not wrong


@pytest.mark.parametrize("package", ["encoder", "service"])
def test_only_families_name_families(package: str) -> None:
    names = "|".join(
        word
        for path in (CHECKOUT / "families").iterdir()
        if path.is_dir() and not path.name.startswith("_")
        for word in (path.name, path.name.partition("_")[0])
    )
    found = [path.name for path in sources(package) if re.search(names + "|radio", path.read_text("utf-8"), re.I)]
    assert not found


def test_the_sdk_opens_its_doors_to_the_server_only_when_called() -> None:
    for path in sources("saccade"):
        assert not [module for module, top in imports(path) if top and within(module, "service")], path


def test_triton_is_only_imported_by_kernels_and_never_by_a_reference() -> None:
    found = [
        path.relative_to(CHECKOUT).as_posix()
        for package in PACKAGES
        for path in sources(package)
        for module, top in imports(path)
        if within(module, "triton") and (top or package != "kernels") and not path.name.endswith("kernel.py")
    ]
    assert not found


def test_the_walk_sees_what_it_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CHECKOUT", tmp_path)
    file = tmp_path / "encoder" / "bad.py"
    file.parent.mkdir()
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hidden\nfrom decoder import request\n"
        "from . import budget\nclass A:\n    import asyncio\ndef f():\n    import service.common.errors\n"
    )
    assert set(imports(file)) == {
        ("typing.TYPE_CHECKING", True),
        ("decoder.request", True),
        ("encoder.budget", True),
        ("asyncio", True),
        ("service.common.errors", False),
    }
    with pytest.raises(AssertionError) as told:
        test_imports_follow_the_arrows("encoder")
    for module in ("decoder.request", "asyncio", "service.common.errors"):
        assert f"encoder/bad.py imports {module}" in str(told.value)
    with pytest.raises(AssertionError, match="decoder has no files"):
        sources("decoder")


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    script = CHECKOUT / "protos" / "generate.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "saccade" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in (CHECKOUT / "saccade" / "v1").glob("*_pb2*")}
    assert fresh.keys() == committed.keys()
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert not stale, "run `make protos`"


def test_transformers_does_not_take_our_kernels_for_the_package_of_that_name() -> None:
    from transformers.utils import import_utils

    import kernels

    assert Path(kernels.__file__ or "").parent == CHECKOUT / "kernels"
    assert not hasattr(kernels, "__version__")
    assert not import_utils.is_kernels_available()


def test_what_a_machine_cannot_run_is_skipped_with_a_reason() -> None:
    """A file that is not collected counts as nothing, and a test that returns counts as passed; neither shows that
    something was skipped."""
    found = []
    asked = {"is_available", "platform", "UNAVAILABLE", "library", "which", "find_spec", "environ"}
    other = "def|class|for|with|while|else|try|except|case"
    returns = re.compile(rf"^(?! *(?:async )?(?:{other})\b).*:\s*(?:#.*\s*)*return\b", re.MULTILINE)
    for path in sorted((CHECKOUT / "tests").rglob("*.py")):
        name = path.relative_to(CHECKOUT)
        text = path.read_text("utf-8")
        may_return = path.name.startswith("test_") and any(word in text for word in asked) and returns.search(text)
        if "collect_ignore" not in text and not may_return:
            continue  # parsing all files takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name) and node.id.startswith("collect_ignore"):
                found.append(f"{name}:{node.lineno} leaves files out")
            elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Return):
                words = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.test)}
                if words & asked and may_return:
                    found.append(f"{name}:{node.lineno} returns where it should be skipped")
    assert not found


@pytest.mark.parametrize("module", ["service.servers.run", "service.servers.frontend_process"])
def test_a_frontend_imports_no_torch(module: str) -> None:
    """Only processes with tensors import torch: the engine, the encoder, and the workers that make patches. The others
    of these packages are loaded by the workers, by the first request that needs them, or by another command; they would
    take 20 MiB."""
    heavy = {"torch", "triton", "safetensors", "numpy", "PIL", "av", "pydantic", "starlette", "uvicorn", "llguidance"}
    program = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_memory_is_asked_for_in_one_place() -> None:
    """Elsewhere the limit of a container would be forgotten."""
    asking = {
        path.relative_to(CHECKOUT).as_posix()
        for package in ("kernels", "encoder", "decoder", "families", "service", "saccade")
        for path in sources(package)
        if any(name in path.read_text("utf-8") for name in ("SC_PHYS_PAGES", "meminfo", "psutil"))
    }
    assert asking == {"kernels/machine_memory.py"}


def test_cores_are_counted_in_one_place() -> None:
    """Elsewhere the quota of a container, or the hardware threads of a core, would be forgotten."""
    counting = {
        path.relative_to(CHECKOUT).as_posix()
        for package in ("kernels", "encoder", "decoder", "families", "service", "saccade")
        for path in sources(package)
        if any(name in path.read_text("utf-8") for name in ("sched_getaffinity", "cpu_count"))
    }
    # Compiles libraries when a package is built.
    assert counting == {"kernels/cores.py", "kernels/native/prebuilt.py"}


@pytest.mark.parametrize("package", PACKAGES)
def test_classes_have_fewer_than_twenty_methods(package: str) -> None:
    """A larger one has more than one job."""
    large = [
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in sources(package)
        for name, methods in parsed(path).classes
        if methods >= 20
    ]
    assert not large
