"""A machine that cannot build the compiled code says why, once, and products go on without it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kernels.linear import Linear, quantise
from kernels.native import NativeUnavailable, library
from kernels.native.library import FEATURES, _library

THREADLESS = """
import resource, torch
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

MODULE = sys.modules[_library.__module__]  # the package's function has the module's name


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(MODULE, "processor_features", lambda: FEATURES)
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
    monkeypatch.setattr(MODULE, "processor_features", lambda: FEATURES - {"avx512_bf16"})
    with pytest.raises(NativeUnavailable, match="this processor lacks avx512_bf16"):
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
