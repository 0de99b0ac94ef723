"""The instruction set amx: bits of its products, its instructions, and the permission to use them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grouped_weights import grouped
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import Packed, quantise
from kernels.linear.int8_rows import int8_linear
from kernels.native import NativeUnavailable
from kernels.native.compiler import FLAGS, SOURCE, find_compiler
from kernels.native.instruction_sets import SETS, processor_features, request_state

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
    """Sums cancel, so that only the rounding errors are left."""
    half = torch.randn(100, k // 2).bfloat16()
    weight = torch.cat((half, half), 1)
    packed = Packed(weight, None)
    for rows in (1, 2, 15, 16, 17, 200):
        half = torch.randn(rows, k // 2).bfloat16()
        x = torch.cat((half, -half), 1)
        assert torch.equal(packed(x), tiles_of_bfloat16(x, weight).bfloat16()), rows


@only_amx
@pytest.mark.parametrize("compact", [False, True])
def test_numbers_below_the_normal_ones_are_zeros(chosen: str, compact: bool) -> None:
    """For plain weights and for those that are unpacked, for few rows and for many."""
    tiny = torch.full((64, 32), 2.0**-130).bfloat16()
    assert tiny.any()
    small = torch.full((64, 32), 2.0**-100).bfloat16()
    for rows in (1, 2, 40):
        assert not Packed(tiny, None, compact=compact)(torch.full((rows, 32), 2.0**100).bfloat16()).any()
        assert not Packed(small, None, compact=compact)(torch.full((rows, 32), 2.0**-40).bfloat16()).any()
        large = torch.full((64, 32), 2.0**100).bfloat16()
        assert not Packed(large, None, compact=compact)(torch.full((rows, 32), 2.0**-130).bfloat16()).any()


@only_amx
@pytest.mark.parametrize("k", [16, 64, 330, 1040], ids=str)
def test_products_of_bytes_have_the_bits_of_the_reference_in_tiles_as_without(chosen: str, k: int) -> None:
    weight = quantise(torch.randn(100, k), "int8")
    packed = Packed(weight, None, int8_rows=True)
    for rows in (6, 7, 16, 33, 200):
        x = torch.randn(rows, k)
        assert torch.equal(packed(x), int8_linear(x, weight, None)), rows


@only_amx
@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks", "nvfp4", "int4", "int4 zeros", "int8 blocks", "int8 zeros"])
def test_unpacked_weights_are_multiplied_as_few_rows_as_they_are_as_many(chosen: str, kind: str) -> None:
    """While the first rows are multiplied, the weights are unpacked and kept for the other rows."""
    weight = grouped(kind, 336)
    packed, x = Packed(weight, None, torch.bfloat16), torch.randn(70, 336).bfloat16()
    together = packed(x)
    exact = F.linear(x.double(), weight.dequantise(torch.float64))
    torch.testing.assert_close(together.double(), exact, rtol=0.01, atol=1e-3 * float(exact.abs().max()))
    for rows in (1, 16, 17, 32, 33):
        assert torch.equal(packed(x[:rows]), together[:rows]), rows


@only_amx
@pytest.mark.parametrize("kind", ["plain", "compact", "fp8", "nvfp4"])
@pytest.mark.parametrize(("k", "outputs"), [(4096, 600), (6160, 330)], ids=str)
def test_long_rows_have_the_same_bits_in_slices_as_whole(chosen: str, kind: str, k: int, outputs: int) -> None:
    """From 64 rows on. Some units have fewer panels than others."""
    weight = (torch.randn(outputs, k) * 0.02).bfloat16()
    packed = (
        Packed(weight, None, compact=kind == "compact")
        if kind in ("plain", "compact")
        else Packed(quantise(weight, kind), None, torch.bfloat16)
    )
    x = torch.randn(270, k).bfloat16()
    alone = torch.cat([packed(rows) for rows in x.split(32)])
    for rows in (64, 65, 270):
        assert torch.equal(packed(x[:rows]), alone[:rows]), rows


@only_amx
@pytest.mark.parametrize("kind", ["plain", "compact", "bytes"])
def test_rows_that_several_units_of_work_have_are_multiplied_as_alone(chosen: str, kind: str) -> None:
    """3,000 inputs of 520 rows do not stay in a thread's cache. The last block of rows begins in the one before it."""
    weight = (torch.randn(130, 3000) * 0.02).bfloat16()
    packed = (
        Packed(quantise(weight, "int8"), None, int8_rows=True)
        if kind == "bytes"
        else Packed(weight, None, compact=kind == "compact")
    )
    x = torch.randn(530, 3000).bfloat16()
    alone = torch.cat([packed(rows) for rows in x.split(16)])
    for rows in (17, 31, 33, 40, 63, 65, 520, 530):
        assert torch.equal(packed(x[:rows]), alone[:rows]), rows


@only_amx
@pytest.mark.parametrize(("k", "outputs"), [(16, 20), (200, 100), (336, 100), (1040, 20)], ids=str)
def test_rows_of_two_bytes_have_the_same_bits_in_tiles_as_without(chosen: str, k: int, outputs: int) -> None:
    """Up to three rows are multiplied without tiles. Quarters of a long panel are units of work."""
    weight = quantise(torch.randn(outputs, k), "int8")
    packed, x = Packed(weight, None), torch.randn(70, k).bfloat16()
    alone = torch.cat([packed(row[None]) for row in x])
    exact = F.linear(x.double(), weight.dequantise(torch.float64))
    torch.testing.assert_close(alone.double(), exact, rtol=0.01, atol=1e-3 * float(exact.abs().max()))
    for rows in (3, 4, 16, 17, 70):
        assert torch.equal(packed(x[:rows]), alone[:rows]), rows


TILES = """
#include "tiles_amx.h"
template <class Block>
void run(const char* x, int64_t rows, const char* w, int64_t length, Prefetch prefetch, float* y) {
    const TileRows all = TileRows::consecutive(x, 64, rows);
    Block::begin(all);
    Block::add(all, 0, w, 256, length, prefetch);
    Block::store(y);
    Block::zero();
    release_tiles();
}
#define RUN(name, ...) \\
    extern "C" void name(const char* x, int64_t rows, const char* w, int64_t length, Prefetch* prefetch, float* y) { \\
        run<TileBlock<__VA_ARGS__>>(x, rows, w, length, *prefetch, y); \\
    }
RUN(one_tile_of_rows, DotBf16, 1, 4)
RUN(two_tiles_of_rows, DotBf16, 2, 2)
RUN(bytes, DotBytes, 2, 2)
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
    pairs = ["%tmm6,%tmm4,%tmm0", "%tmm7,%tmm4,%tmm1", "%tmm6,%tmm5,%tmm2", "%tmm7,%tmm5,%tmm3"]
    single = ["%tmm5,%tmm4,%tmm0", "%tmm6,%tmm4,%tmm1", "%tmm7,%tmm4,%tmm2", "%tmm5,%tmm4,%tmm3"]
    for name, wanted in (("tdpbf16ps", [*single * 2, *pairs * 2]), ("tdpbsud", pairs * 2)):
        steps = [line.split()[1] for line in found if line.startswith(name)]
        assert sorted(steps) == sorted(wanted), "a loop, and the last inputs"
    assert sum(line.startswith("ldtilecfg") for line in found) == sum(line == "tilerelease" for line in found) == 3
    assert sum(line.startswith("tilestored") for line in found) == 12
    assert sum(line.startswith("tilezero") for line in found) == 12


def test_a_state_that_the_kernel_does_not_permit_is_an_error_with_its_reason() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("asks Linux on x86-64")
    with pytest.raises(NativeUnavailable, match="does not permit the processor's state component 63: "):
        request_state(63)


SMALL_STACK = """
import ctypes, logging
logging.basicConfig()
from kernels.native.instruction_sets import choose, processor_features
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
print(choose("auto", processor_features()).name)
"""


def test_without_the_kernels_permission_the_next_best_set_is_used_and_the_log_says_why() -> None:
    """Linux refuses tiles to a process whose stack for signals has no room for them."""
    if not AMX.needs <= processor_features():
        pytest.skip("needs a processor with AMX")
    said = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=True)
    assert said.stdout == "avx512bf16\n"
    reason = "the kernel does not permit the processor's state component 18: No space left on device"
    assert f"AMX is not used: {reason}" in said.stderr
