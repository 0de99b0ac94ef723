"""The compiled code for AArch64, cross-compiled and run by qemu-user where both are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from compiled_elsewhere import COMPILER, EMULATOR, attention, build, product
from instruction_set import using
from torch import Tensor

from kernels.linear import Packed, Quantised, quantise
from kernels.linear.int8_rows import int8_linear
from kernels.linear.layouts import MOST_INPUTS
from kernels.native import Activation, NativeUnavailable

pytestmark = pytest.mark.skipif(
    not (COMPILER and EMULATOR),
    reason="needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu and qemu-user)",
)
IN_FLOAT32 = [("float32", "float32"), *((stored, "float32") for stored in ("int8", "int8-32", "int4", "nvfp4"))]
IN_BFLOAT16 = [(stored, "bfloat16") for stored in ("bfloat16", "int8-32", "int4", "fp8", "nvfp4")]
PROCESSORS = {"neon": (), "neon-asimddp": ("asimddp",), "neonbf16": ()}
"""What a set's library is built for beyond what the set needs."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each program is built once, when a test first needs it."""

    @cache
    def program(name: str) -> Path:
        folder, features = tmp_path_factory.mktemp(name), PROCESSORS[name]
        return build(name.partition("-")[0], folder, features, attention=not features)

    return program


def packed(stored: str, rows: str, k: int = 1280) -> tuple[Packed, Tensor]:
    """A product, and the float64 weight that it stands for, whose second half is its first. Panels of `k` >= 1024
    inputs are divided among threads."""
    dtype, weight = getattr(torch, rows), (torch.randn(100, k // 2) * 0.03).repeat(1, 2)
    if stored == rows:
        return Packed(weight.to(dtype), None), weight.to(dtype).double()
    quantised = quantise(weight, stored)
    return Packed(quantised, None, dtype), quantised.dequantise().double()


@pytest.mark.parametrize("kind", ["int8", "int8-32", "int4", "int4-32"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_products_of_int8_rows_have_the_bits_of_the_reference(
    programs: Callable[[str], Path], name: str, kind: str
) -> None:
    """Widened, with products of signed bytes, and with products of unsigned and signed bytes."""
    weight = quantise(torch.randn(100, 330), kind)
    try:
        packed = Packed(weight, None, int8_rows=True)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    for count in (1, 6, 13):
        x = torch.randn(count, 330)
        found = product(programs(name), packed, x, Activation.NONE)
        assert torch.equal(found, int8_linear(x, weight, None)), count


@pytest.mark.parametrize(
    ("name", "stored", "rows"),
    [("neon", *case) for case in IN_FLOAT32 + IN_BFLOAT16] + [("neonbf16", *case) for case in IN_FLOAT32],
)
def test_products_without_bfloat16_instructions_have_the_bits_of_the_other_sets(
    programs: Callable[[str], Path], name: str, stored: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are in the same order, and each step is one fused operation."""
    with using("avx2", monkeypatch):
        for k in (640, 1280):
            weight, _ = packed(stored, rows, k)
            for count in (1, 2, 3, 6, 13):
                x = torch.randn(count, k).to(getattr(torch, rows))
                found = product(programs(name), weight, x, Activation.SILU)
                assert torch.equal(found, weight(x, Activation.SILU)), (k, count)


@pytest.mark.parametrize("name", PROCESSORS)
def test_sums_of_the_longest_rows_are_exact(programs: Callable[[str], Path], name: str) -> None:
    values = torch.full((70, MOST_INPUTS), 127, dtype=torch.int8)
    weight = Packed(Quantised("int8", values, torch.ones(70, 1), MOST_INPUTS, MOST_INPUTS), None, torch.float32)
    x = torch.full((3, MOST_INPUTS), 32639.0)
    x[1] = -x[1]
    exact = (x.double() @ values.double().t()).float()
    assert torch.equal(product(programs(name), weight, x, Activation.NONE), exact)


@pytest.mark.parametrize(("stored", "k"), [("bfloat16", 640), *((stored, 1280) for stored, _ in IN_BFLOAT16)])
def test_a_row_of_bfloat16_pairs_has_the_same_bits_alone_and_in_a_batch(
    programs: Callable[[str], Path], stored: str, k: int
) -> None:
    program = programs("neonbf16")
    weight, exact = packed(stored, "bfloat16", k)
    x = torch.randn(13, k).bfloat16()
    x[::2, k // 2 :] = -x[::2, : k // 2]  # sums cancel, so that only the rounding errors are left
    together = product(program, weight, x, Activation.NONE)
    torch.testing.assert_close(together.double(), x.double() @ exact.T, rtol=0.01, atol=0.01)
    for count in range(1, 8):  # all heights of a tile, and two tiles
        assert torch.equal(product(program, weight, x[:count], Activation.NONE), together[:count]), count


@pytest.mark.parametrize("name", ["neon", "neonbf16"])
@pytest.mark.parametrize("width", [40, 64], ids=str)
def test_attention_has_the_same_bits_packed_alone_and_as_a_decode_row(
    programs: Callable[[str], Path], name: str, width: int
) -> None:
    program, lengths = programs(name), (5, 47, 150)
    qkv = torch.randn(sum(lengths), 3, 2, width)
    together, _ = attention(program, qkv, lengths)
    own = qkv[-150:]
    alone, few = attention(program, own, [150], before=143)
    assert torch.equal(alone, together[-150:])
    assert torch.equal(few, alone[-16:, 0])
    assert torch.equal(attention(program, own.bfloat16().float(), [150])[0], alone), "as torch rounds"
    q, k, v = own.double().unbind(1)
    weights = (torch.einsum("qhd,khd->hqk", q, k) * width**-0.5).softmax(-1)
    torch.testing.assert_close(alone.double(), torch.einsum("hqk,khd->qhd", weights, v), rtol=0.02, atol=0.02)
