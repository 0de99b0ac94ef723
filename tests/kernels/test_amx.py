"""The instruction set amx: bits of its products, its instructions, and the permission to use them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.linear import Packed, quantise
from kernels.linear.int8_rows import int8_linear
from kernels.native import NativeUnavailable
from kernels.native.compiler import FLAGS, SOURCE, find_compiler
from kernels.native.instruction_sets import SETS, processor_features
from kernels.native.library import request_state

AMX = next(each for each in SETS if each.name == "amx")
only_amx = pytest.mark.parametrize("chosen", ["amx"], indirect=True)


def tiles_of_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    """`[rows, k]`, `[n, k]` -> float32 `[rows, n]` with the bits of TDPBF16PS, 32 inputs at a time. A product of two
    bfloat16 is exact in float32, so that adding it rounds as the fused operation does."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for begin in range(0, x.shape[1], 32):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for i in range(begin, min(begin + 32, x.shape[1])):
            sums[i % 2] += x[:, i, None].float() * weight[None, :, i].float()
        total += sums[0] + sums[1]
    return total


@only_amx
@pytest.mark.parametrize("k", [14, 32, 330, 1026], ids=str)
def test_products_of_bfloat16_have_the_bits_of_the_manual(chosen: str, k: int) -> None:
    """Sums cancel, so that what is left of them are the errors of each rounding."""
    half = torch.randn(100, k // 2).bfloat16()
    weight = torch.cat((half, half), 1)
    packed = Packed(weight, None)
    for rows in (1, 2, 15, 16, 17, 200):
        half = torch.randn(rows, k // 2).bfloat16()
        x = torch.cat((half, -half), 1)
        assert torch.equal(packed(x), tiles_of_bfloat16(x, weight).bfloat16()), rows


@only_amx
def test_numbers_below_the_normal_ones_are_zeros(chosen: str) -> None:
    tiny = torch.full((3, 32), 2.0**-130).bfloat16()
    assert tiny.any()
    assert not Packed(tiny, None)(torch.full((2, 32), 2.0**100).bfloat16()).any()
    small = torch.full((3, 32), 2.0**-100).bfloat16()
    assert not Packed(small, None)(torch.full((2, 32), 2.0**-40).bfloat16()).any()


@only_amx
@pytest.mark.parametrize("k", [16, 64, 330, 1040], ids=str)
def test_products_of_bytes_have_the_bits_of_the_reference_in_tiles_as_without(chosen: str, k: int) -> None:
    weight = quantise(torch.randn(100, k), "int8")
    packed = Packed(weight, None, int8_rows=True)
    for rows in (6, 7, 16, 33, 200):
        x = torch.randn(rows, k)
        assert torch.equal(packed(x), int8_linear(x, weight, None)), rows


TILES = """
#include "tiles_amx.h"
extern "C" void run(const char* x, int64_t rows, const void* w, int64_t ahead, float* y) {
    tile_amx<4>(x, 64, y, rows, *static_cast<const Weight*>(w), 0, 0, Ahead(x, x + ahead, 64), y);
}
"""


def test_its_instructions_are_those_of_amx(tmp_path: Path) -> None:
    objdump = shutil.which("objdump")
    try:
        compiler = find_compiler()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    if objdump is None:
        pytest.skip("needs objdump")
    (tmp_path / "tiles.cpp").write_text(TILES)
    flags = [flag for flag in FLAGS if flag != "-shared"]
    command = [compiler, *flags, *AMX.flags, f"-I{SOURCE.parent}", "-c", "tiles.cpp", "-o", "tiles.o"]
    subprocess.run(command, cwd=tmp_path, check=True)
    said = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", "tiles.o"], cwd=tmp_path, capture_output=True, text=True
    )
    found = [line.split("\t")[1].split("#")[0].strip() for line in said.stdout.splitlines() if line.count("\t") == 1]
    for name, columns in (("tdpbf16ps", "5675"), ("tdpbsud", "5675")):
        steps = [line for line in found if line.startswith(name)]
        wanted = [f"%tmm{column},%tmm4,%tmm{sums}" for sums, column in enumerate(columns)]
        assert [line.split()[1] for line in steps] == wanted * 2, "a loop, and the last inputs"
    assert sum(line.startswith("ldtilecfg") for line in found) == sum(line == "tilerelease" for line in found) == 2
    assert sum(line.startswith("tilestored") for line in found) == 8


def test_a_kernel_that_does_not_permit_tiles_is_an_error_with_its_reason() -> None:
    if "amx_tile" in processor_features():
        pytest.skip("this kernel permits them")
    assert AMX.state_component is not None
    with pytest.raises(NativeUnavailable, match="does not permit the processor's state component 18: "):
        request_state(AMX.state_component)
