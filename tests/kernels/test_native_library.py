"""On a machine that cannot build the compiled code, the reason is logged once, and products work without it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kernels.linear import Linear, Packed, quantise
from kernels.native import NativeUnavailable, compiler, instruction_sets, library, prebuilt, structs
from kernels.native.compiler import compiled
from kernels.native.instruction_sets import SETS, processor_features, supported
from kernels.native.layout import check_layout, mirrored
from kernels.native.library import _library, origin

THREADLESS = """
import resource
from service.common.helper_process import torch_imports
with torch_imports():  # half of the time
    import torch
from kernels.linear import Packed, quantise
from kernels.native import NativeUnavailable
weight, x = torch.randn(640, 256), torch.randn(6, 256)
try:
    packed = Packed(quantise(weight, "int8"), None)
except NativeUnavailable:
    print(True)
else:
    alone = packed(x)
    torch.set_num_threads(4)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4_000_000, resource.RLIM_INFINITY))  # a thread's stack takes 8 MB
    print(torch.equal(packed(x), alone))
"""

MODULE = sys.modules[_library.__module__]  # the package has a function with the module's name


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(MODULE, "processor_features", lambda: set(SETS[0].needs))
    monkeypatch.setattr(instruction_sets, "_forced", instruction_sets.AUTO)
    _library.cache_clear()
    yield
    _library.cache_clear()


@pytest.mark.parametrize(
    ("compiler", "words"), [("no-such-compiler", "no C\\+\\+ compiler"), ("false", "false failed")]
)
def test_without_a_compiler_products_are_the_same(monkeypatch: pytest.MonkeyPatch, compiler: str, words: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    for _ in range(2):
        with pytest.raises(NativeUnavailable, match=words):
            library()
    assert _library.cache_info().misses == 1
    x = torch.randn(3, 140)
    for kind in ("int8", "int4"):
        packed = quantise(torch.randn(20, 140), kind)
        torch.testing.assert_close(Linear(packed)(x), F.linear(x, packed.dequantise()))
    weight = torch.randn(20, 140).bfloat16()
    torch.testing.assert_close(Linear(weight)(x.bfloat16()), F.linear(x.bfloat16(), weight), rtol=0.02, atol=0.05)


def test_another_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "processor_features", lambda: SETS[0].needs - {"avx2", "fma"})
    with pytest.raises(NativeUnavailable, match="this processor lacks avx2, fma"):
        library()


@pytest.mark.parametrize("home", ["a file", "unknown"])
def test_without_a_place_to_keep_it_it_is_built_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    if home == "unknown":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a user without an entry, as in some containers
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] || { echo built > "$last"; echo >> "$0.runs"; }\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="saccade-native-.*invalid ELF|saccade-native-.*file too short"):
        library()
    assert (tmp_path / "compiler.runs").read_text() == "\n" and not list(tmp_path.glob("saccade-native-*"))


def test_without_more_threads_the_caller_does_the_work() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": ""}
    command = [sys.executable, "-c", THREADLESS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"], done.stderr


def test_structs_that_differ_from_the_compiled_ones_are_named() -> None:
    """A field that has moved, a new one, a size, an enum's value, a constant."""
    lines = {name: " ".join(map(str, numbers)) for name, numbers in mirrored().items()}
    check_layout("\n".join(f"{name} {numbers}" for name, numbers in lines.items()))
    changes = {
        "Step.rows": "16 8", "Tower": "8", "Code.EMBED": "14", "Form.PLAIN": "2", "PANEL": "32", "BLOCK_TOKENS": "8",
        "SampleParams.top_p": "8 4", "Drafting.new_field": "112 8", "Draw.known": None,
    }  # fmt: skip
    for name, numbers in changes.items():
        theirs = {**lines, name: numbers}
        with pytest.raises(AssertionError, match=rf"compiled code differ: {name} is .* in Python and .* in C\+\+$"):
            check_layout("\n".join(f"{name} {numbers}" for name, numbers in theirs.items() if numbers is not None))


def use_the_build_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(MODULE, "processor_features", processor_features)


@pytest.mark.skipif(not supported(processor_features()), reason="no instruction set for this processor")
def test_the_library_is_compared_with_its_mirrors_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    use_the_build_that_is_there(monkeypatch)
    monkeypatch.setattr(structs, "GROUP", 64)
    with pytest.raises(AssertionError, match=r"differ: GROUP is \(64,\) in Python and \(128,\) in C\+\+$"):
        library()


@pytest.mark.skipif(not supported(processor_features()), reason="no instruction set for this processor")
def test_a_library_of_the_package_needs_no_compiler_and_is_not_used_for_another_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    use_the_build_that_is_there(monkeypatch)
    features = processor_features()
    best = supported(features)[0]
    built = compiled(best.name, best.options(features), contextlib.ExitStack())
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    assert origin(best).startswith("built by ")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        origin(best)

    (tmp_path / "prebuilt").mkdir()
    file = tmp_path / "prebuilt" / prebuilt.file_name(best, features)
    shutil.copy(built, file)
    assert origin(best) == "built into the package"
    library()
    assert f"compiled code came with the package: {file}" in caplog.text

    file.rename(file.with_name(f"{best.name}-{'0' * 24}.so"))
    _library.cache_clear()
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        library()
    assert "the compiled code in the package was built from another source" in caplog.text

    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "broken")  # another path: a library is opened once for a path
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / file.name).write_text("of another machine")
    _library.cache_clear()
    monkeypatch.delenv("CXX")
    library()
    assert "the compiled code in the package cannot be loaded" in caplog.text


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_library_is_built_for_each_processor_of_the_compiler_s_kind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str
) -> None:
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\nfor last; do :; done\ncase "$1" in\n'
        f'-dumpmachine) echo {machine}-linux-gnu;;\n--version) ;;\n*) echo "$@" > "$last";;\nesac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    built = prebuilt.build(tmp_path / "prebuilt")
    ours = [each for each in SETS if each.name.startswith("neon") == (machine == "aarch64")]
    optional = {each: [flag for flag, _ in each.optional] for each in ours}
    found = {
        prebuilt.find(each, each.needs.union(there))
        for each, flags in optional.items()
        for count in range(len(flags) + 1)
        for there in combinations(flags, count)
    }
    assert found == set(built) and len(built) == sum(2 ** len(flags) for flags in optional.values())
    assert all("=native" not in path.read_text() for path in built), "for this processor only"
    assert not any(prebuilt.find(each, each.needs) for each in SETS if each not in ours)
    least = ours[-1]
    for features in (least.needs, least.needs.union(optional[least])):
        alone = tmp_path / "alone" / prebuilt.file_name(least, features)
        assert prebuilt.build(alone.parent, features) == [alone]


def test_code_for_another_processor_is_checked_by_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("#ifdef __AVX512F__\nint wrong() { return right; }\n#endif\n")
    monkeypatch.setattr(compiler, "SOURCE", wrong)
    with pytest.raises(NativeUnavailable, match=r"-mavx512f.* failed: [^$]*right.* was not declared"):
        prebuilt.check_others(set())
    assert prebuilt.build(tmp_path / "here", set()) == []
    wrong.write_text("int right();\n")
    prebuilt.check_others(set())


@pytest.mark.skipif(not supported(processor_features()), reason="no instruction set for this processor")
def test_a_phase_may_have_more_than_a_million_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs: one with an odd number, one with an even number."""
    use_the_build_that_is_there(monkeypatch)
    packed, x = Packed(quantise(torch.randn(1, 2), "int8"), None), torch.randn((1 << 20) + 5, 2)
    alone = packed(x)
    torch.set_num_threads(2)
    assert all(torch.equal(packed(x), alone) for _ in range(2))
