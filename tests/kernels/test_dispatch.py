"""The choice between reference and kernel."""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys

import pytest
import torch

from kernels import dispatch
from kernels.aot import operations
from kernels.dispatch import dispatched, forced
from kernels.rms_norm import reference, rms_norm


def test_a_cpu_runs_the_reference_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._logged.clear()
    x = torch.randn(2, 8)
    with caplog.at_level(logging.INFO, "kernels"):
        with forced("reference"):
            first, second = rms_norm(x, torch.ones(8), 1e-5), rms_norm(x, torch.ones(8), 1e-5)
    assert torch.equal(first, second) and torch.equal(first, reference.rms_norm(x, torch.ones(8), 1e-5))
    assert caplog.messages == ["rms_norm on cpu runs the reference implementation: the caller forced it"]


def test_the_device_decides() -> None:
    assert dispatch.implementation("cuda")[0] == "triton"
    assert dispatch.implementation("cpu")[0] == "reference"
    with forced("triton"):
        assert dispatch.implementation("cpu")[0] == "triton"
    assert dispatch.implementation("cpu")[0] == "reference"


def test_the_kernel_is_not_imported_before_it_is_needed() -> None:
    code = "from service.common.helper_process import torch_imports\nwith torch_imports(): import sys, torch\n"
    code += "import kernels.rms_norm as k; k.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5); "
    code += "sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_missing_kernel_is_an_error() -> None:
    def no_such_op(x: torch.Tensor) -> torch.Tensor:
        return x

    no_such_op.__module__ = "kernels.none_such.reference"
    with forced("triton"), pytest.raises(RuntimeError, match="kernels.none_such.kernel cannot be imported"):
        dispatched(no_such_op)(torch.ones(1))
    with forced("triton"):
        assert dispatched(no_such_op, kernel=False)(torch.ones(1)).item() == 1


@pytest.mark.parametrize("operation", operations())
def test_kernels_have_the_signatures_of_their_references(operation: str) -> None:
    package, twin = (importlib.import_module(f"kernels.{operation}{part}") for part in ("", ".kernel"))
    shared = [value for value in vars(package).values() if hasattr(value, "__wrapped__")]
    found = [function for function in shared if hasattr(twin, function.__name__)]
    assert found
    for function in found:
        expected = inspect.signature(function.__wrapped__).parameters
        given = inspect.signature(getattr(twin, function.__name__)).parameters
        assert list(given) == list(expected)
        assert [p.default for p in given.values()] == [p.default for p in expected.values()]
