"""The compiled code for AArch64, cross-compiled and run by qemu-user where both are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_elsewhere import COMPILER, EMULATOR, build, product

from kernels.linear import Packed, quantise
from kernels.linear.int8_rows import int8_linear
from kernels.native import Activation, NativeUnavailable, instruction_sets

pytestmark = pytest.mark.skipif(
    not (COMPILER and EMULATOR), reason="needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: qemu-user)"
)
CASES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "float32"), ("int4", "float32")]
CASES += [("int4", "bfloat16"), ("fp8", "bfloat16"), ("nvfp4", "bfloat16"), ("nvfp4", "float32")]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("neon", tmp_path_factory.mktemp("aarch64"))


@pytest.mark.parametrize("features", [(), ("asimddp",), ("asimddp", "i8mm")], ids="-".join)
def test_products_of_int8_rows_have_the_bits_of_the_reference(
    program: Path, tmp_path: Path, features: tuple[str, ...]
) -> None:
    """Widened, with products of signed bytes, and with products of unsigned and signed bytes."""
    there = build("neon", tmp_path, features) if features else program
    weight = quantise(torch.randn(100, 330), "int8")
    try:
        packed = Packed(weight, None, int8_rows=True)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    for count in (1, 6, 13):
        x = torch.randn(count, 330)
        assert torch.equal(product(there, packed, x, Activation.NONE), int8_linear(x, weight, None)), count


@pytest.mark.parametrize(("stored", "rows"), CASES, ids=["-".join(case) for case in CASES])
def test_products_have_the_bits_of_the_other_sets_without_bfloat16_instructions(
    program: Path, stored: str, rows: str
) -> None:
    """Sums are in the same order, and each step is one fused operation."""
    dtype = getattr(torch, rows)
    instruction_sets.use("avx2")
    try:
        weight = torch.randn(100, 1280) * 0.03
        packed = Packed(weight.to(dtype), None) if stored == rows else Packed(quantise(weight, stored), None, dtype)
        for count in (1, 2, 3, 6, 13):
            x = torch.randn(count, 1280).to(dtype)
            assert torch.equal(product(program, packed, x, Activation.SILU), packed(x, Activation.SILU)), count
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    finally:
        instruction_sets.use("auto")
