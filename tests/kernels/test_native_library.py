"""A machine that cannot build the compiled code says why, once, and products go on without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from kernels.linear import Linear, quantise
from kernels.native import NativeUnavailable, library
from kernels.native.library import FEATURES, _library

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
