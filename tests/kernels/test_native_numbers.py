"""Functions of sixteen numbers in compiled code, against float64."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.native.compiler import FLAGS, SOURCE
from kernels.native.instruction_sets import processor_features, supported

CALLS = """
#include "activations.h"
#include "numbers.h"
template <typename F>
void each(const float* from, float* to, int64_t count, F function) {
    for (int64_t i = 0; i < count; i += 16) {
        const Mask mask = lanes(count - i);
        store16(to + i, mask, function(load16(from + i, mask)));
    }
}
extern "C" void exponential(const float* x, float* y, int64_t n) { each(x, y, n, exp16); }
extern "C" void soft_plus(const float* x, float* y, int64_t n) { each(x, y, n, softplus16); }
extern "C" void square_and_add(const float* x, float* y, int64_t n) {
    each(x, y, n, [](Floats v) { return v * v + v; });
}
extern "C" void fused_square_and_add(const float* x, float* y, int64_t n) {
    each(x, y, n, [](Floats v) { return fmadd(v, v, v); });
}
"""
NAMES = ("exponential", "soft_plus", "square_and_add", "fused_square_and_add")
Function = Callable[[Tensor], Tensor]


THERE = supported(processor_features())


@pytest.fixture(scope="module", params=[each.name for each in THERE])
def functions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Function]:
    wanted = next(each for each in THERE if each.name == request.param)
    folder = tmp_path_factory.mktemp("numbers")
    (folder / "calls.cpp").write_text(CALLS)
    compiler = os.environ.get("CXX") or "g++"
    flags = [*FLAGS, *wanted.options(processor_features())]
    command = [compiler, *flags, "-I", str(SOURCE.parent), str(folder / "calls.cpp"), "-o", str(folder / "calls.so")]
    subprocess.run(command, check=True, capture_output=True)
    loaded = ctypes.CDLL(str(Path(folder / "calls.so")))

    def function(name: str) -> Function:
        def call(x: Tensor) -> Tensor:
            y = torch.full_like(x, float("nan"))
            getattr(loaded, name)(*(ctypes.c_void_p(t.data_ptr()) for t in (x, y)), ctypes.c_int64(x.numel()))
            return y

        return call

    return {name: function(name) for name in NAMES}


def ulps(found: Tensor, exact: Tensor) -> float:
    """The largest distance, in units of the last place of the exact value."""
    rounded = exact.float()
    step = torch.nextafter(rounded.abs(), torch.tensor(torch.inf)).double() - rounded.abs().double()
    return ((found.double() - exact).abs() / step).max().item()


@pytest.mark.parametrize(("low", "high", "bound"), [(-87.0, 88.0, 2.0), (-0.3, 0.0, 0.9), (-1e-3, 1e-3, 0.51)], ids=str)
def test_exp(functions: dict[str, Function], low: float, high: float, bound: float) -> None:
    """Decays are below 1, mostly near it, and are multiplied over thousands of tokens."""
    x = torch.linspace(low, high, 1_000_003)
    found = functions["exponential"](x)
    assert ulps(found, x.double().exp()) <= bound
    assert (found[1:] >= found[:-1] * (1 - 2**-22)).all()


@pytest.mark.parametrize(("low", "high"), [(-80.0, 80.0), (-3.0, 3.0), (-1e-3, 1e-3)], ids=str)
def test_softplus(functions: dict[str, Function], low: float, high: float) -> None:
    x = torch.linspace(low, high, 1_000_003)
    found = functions["soft_plus"](x)
    exact = x.double().clamp(min=0) + (-x.double().abs()).exp().log1p()
    assert ulps(found, exact) <= 4
    assert (found[1:] >= found[:-1] * (1 - 2**-21)).all()


@pytest.mark.parametrize("name", ["exponential", "soft_plus"])
def test_what_is_not_a_number_stays_so_and_the_rest_is_finite(functions: dict[str, Function], name: str) -> None:
    x = torch.tensor([float("nan"), 1e30, -1e30, 88.0, -88.0, 0.0, -0.0])
    found = functions[name](x)
    assert found[0].isnan()
    assert found[1:].isfinite().all() and (found[1:] >= 0).all()


def test_only_what_the_source_fuses_is_rounded_once(functions: dict[str, Function]) -> None:
    """So that bits do not depend on what a compiler, tuned for one processor or another, would rather fuse."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded_twice, rounded_once = x * x + x, (x.double() * x.double() + x.double()).float()
    assert not torch.equal(rounded_twice, rounded_once)
    assert torch.equal(functions["square_and_add"](x), rounded_twice)
    assert torch.equal(functions["fused_square_and_add"](x), rounded_once)


UNDEFINED = """
#include "numbers.h"
int main(int count, char**) {  // nothing that the compiler knows
    const int32_t largest = 0x7fffffff - (count - 1);
    const float number = fast_exp(__builtin_nanf("") * float(count));
    return number == number || total_of(splat_word(largest)) != -16;
}
"""


@pytest.mark.skipif(not THERE, reason="no instruction set for this processor")
def test_numbers_that_are_not_and_sums_that_wrap_have_a_defined_result(tmp_path: Path) -> None:
    (tmp_path / "undefined.cpp").write_text(UNDEFINED)
    flags = ["-std=c++17", "-fsanitize=undefined", "-fno-sanitize-recover=all", *THERE[0].options(processor_features())]
    command = [os.environ.get("CXX") or "g++", *flags, "-I", str(SOURCE.parent), "undefined.cpp", "-o", "undefined"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    done = subprocess.run([str(tmp_path / "undefined")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
