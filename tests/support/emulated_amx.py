"""The instruction set amx on processors without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.native import instruction_sets
from kernels.native.instruction_sets import SETS, processor_features, supported


def emulate_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this processor has avx512bf16 and not amx, its instructions compute those of amx until the end of the test."""
    there = [each.name for each in supported(processor_features())]
    if "amx" in there or "avx512bf16" not in there:
        return
    base = next(each for each in SETS if each.name == "avx512bf16")
    flags = (*base.flags, "-DSACCADE_EMULATE_AMX", "-O1")  # -O1 compiles in half of the time
    sets = [replace(each, needs=base.needs, flags=flags) if each.name == "amx" else each for each in SETS]
    monkeypatch.setattr(instruction_sets, "SETS", tuple(sets))
