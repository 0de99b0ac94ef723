"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from emulated_amx import emulate_amx

from kernels.native import NativeUnavailable, instruction_sets, library
from kernels.native.instruction_sets import SETS, processor_features, supported

X86_SETS = [each.name for each in SETS if not each.name.startswith("neon")]


@pytest.fixture(params=X86_SETS)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of each x86-64 instruction set in turn, which compiled code uses during the test."""
    if request.param == "amx":
        emulate_amx(monkeypatch)
    if request.param not in [each.name for each in supported(processor_features())]:
        pytest.skip(f"this processor has no {request.param}")
    instruction_sets.use(request.param)
    try:
        library()
        yield request.param
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    finally:
        instruction_sets.use("auto")
