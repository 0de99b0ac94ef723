"""Compiled code with a chosen instruction set. A processor without amx emulates it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kernels.native import NativeUnavailable, instruction_sets, library
from kernels.native.instruction_sets import SETS, processor_features, supported


def emulate_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this processor has avx512bf16 but not amx, amx instructions are emulated with avx512bf16 until the end of the
    test."""
    there = [each.name for each in supported(processor_features())]
    if "amx" in there or "avx512bf16" not in there:
        return
    base = next(each for each in SETS if each.name == "avx512bf16")
    quick = ("-Og", "-fno-inline", "-Dalways_inline=unused")  # compiles in a third of the time of -O1
    flags = (*base.flags, "-DSACCADE_EMULATE_AMX", *quick)
    sets = [replace(each, needs=base.needs, flags=flags) if each.name == "amx" else each for each in SETS]
    monkeypatch.setattr(instruction_sets, "SETS", tuple(sets))


@contextmanager
def using(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside the block, compiled code uses this instruction set; the test is skipped if this processor lacks it."""
    if name == "amx":
        emulate_amx(monkeypatch)
    there = [each.name for each in supported(processor_features())]
    if name not in there:
        pytest.skip(f"this processor has no {name}: {', '.join(there)}")
    instruction_sets.use(name)
    try:
        try:
            library()
        except NativeUnavailable as reason:
            pytest.skip(str(reason))
        yield
    finally:
        instruction_sets.use("auto")
