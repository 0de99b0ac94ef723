"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from instruction_set import using

from kernels.native.instruction_sets import SETS

X86_SETS = [each.name for each in SETS if not each.name.startswith("neon")]


@pytest.fixture(params=X86_SETS)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of each x86-64 instruction set in turn, which compiled code uses during the test."""
    with using(request.param, monkeypatch):
        yield request.param
