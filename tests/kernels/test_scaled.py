"""Compiled products with fp8, nvfp4, int4 and grouped int8 weights: every number of the formats, any number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from grouped_weights import grouped
from torch import Tensor
from torch.nn import functional as F

from kernels.linear import Linear, Packed, Quantised, quantise

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
HEIGHTS = (*range(1, 20), 32, 191, 193, 200)
"""Numbers of rows for one tile, several tiles, and more than one block of rows."""


def e4m3(octets: Tensor) -> Tensor:
    return octets.to(torch.uint8).view(torch.float8_e4m3fn)


def every_fp8() -> Quantised:
    """Rows with all numbers except NaN, in a different order in each."""
    octets = torch.tensor([octet for octet in range(256) if octet & 127 != 127] + [0, 128])
    rows = torch.stack([octets.roll(shift) for shift in range(70)])
    return Quantised("fp8", e4m3(rows), torch.full((70, 1), 0.5), 256, group=256)


def every_nvfp4() -> Quantised:
    """All numbers in groups with every scale: row r and group g have 16 numbers with scale (r + g) % 127."""
    codes = torch.arange(16).repeat(127, 8)
    scales = (torch.arange(127)[:, None] + torch.arange(8)) % 127
    return Quantised(
        "nvfp4", (codes[:, 0::2] | codes[:, 1::2] << 4).byte(), e4m3(scales), 128, outer=torch.full((127,), 0.5)
    )


def every_int4(*, zeros: bool) -> Quantised:
    """All numbers, with every zero point."""
    codes = torch.arange(16).repeat(70, 16)
    points = (torch.arange(70)[:, None] + torch.arange(8)) % 17 if zeros else None
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).byte()
    return Quantised(
        "int4", packed, torch.full((70, 8), 0.5), 256, group=32, zeros=None if points is None else points.byte()
    )


def every_int8(*, zeros: bool) -> Quantised:
    """All numbers, with every zero point of every third row."""
    values = torch.stack([torch.arange(-128, 128).roll(shift) for shift in range(70)]).to(torch.int8)
    points = (torch.arange(70)[:, None] * 3 + torch.arange(8) * 37) % 256 if zeros else None
    return Quantised(
        "int8", values, torch.full((70, 8), 0.5), 256, group=32, zeros=None if points is None else points.byte()
    )


EVERY = {
    "int8": lambda: every_int8(zeros=False),
    "int8 zeros": lambda: every_int8(zeros=True),
    "fp8": every_fp8,
    "nvfp4": every_nvfp4,
    "int4": lambda: every_int4(zeros=False),
    "int4 zeros": lambda: every_int4(zeros=True),
}


@DTYPES
@pytest.mark.parametrize("kind", EVERY)
def test_every_number_is_multiplied_as_it_is(chosen: str, kind: str, dtype: torch.dtype) -> None:
    """Rows with a single one return the weight's numbers exactly, alone and in a batch."""
    weight = EVERY[kind]()
    linear, rows = Linear(weight, dtype=dtype), torch.eye(weight.in_features, dtype=dtype)
    expected = weight.dequantise().t()
    assert torch.equal(linear(rows).float(), expected.to(dtype).float())
    assert torch.equal(torch.cat([linear(row[None]) for row in rows]).float(), expected.to(dtype).float())


@DTYPES
@pytest.mark.parametrize("inner", [16, 80, 1104])
@pytest.mark.parametrize("kind", ["fp8", "fp8 blocks", "nvfp4", "int4", "int4 zeros", "int8 blocks", "int8 zeros"])
def test_a_row_is_the_same_in_any_company_and_with_any_threads(kind: str, inner: int, dtype: torch.dtype) -> None:
    weight = grouped(kind, inner)
    linear = Linear(weight, dtype=dtype)
    x = torch.randn(max(HEIGHTS), inner, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    exact = F.linear(x.double(), weight.dequantise(torch.float64))
    torch.testing.assert_close(alone.double(), exact, rtol=0.01, atol=1e-3 * float(exact.abs().max()))
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in HEIGHTS:
            assert torch.equal(linear(x[:rows]), alone[:rows]), rows


@DTYPES
@pytest.mark.parametrize("group", [8, 24, 96, 320])
def test_groups_of_any_size(group: int, dtype: torch.dtype) -> None:
    """Panels are unpacked in slices of some inputs, which divide no group."""
    inner, generator = 1000, torch.Generator().manual_seed(group)
    groups = -(-inner // group)
    values = torch.randint(0, 256, (70, inner // 2), dtype=torch.uint8, generator=generator)
    weight = Quantised("int4", values, torch.rand(70, groups, generator=generator) + 0.5, inner, group=group)
    linear = Linear(weight, dtype=dtype)
    x = torch.randn(130, inner, generator=generator).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    exact = F.linear(x.double(), weight.dequantise(torch.float64))
    torch.testing.assert_close(alone.double(), exact, rtol=0.01, atol=1e-3 * float(exact.abs().max()))
    for rows in (7, 40, 130):
        assert torch.equal(linear(x[:rows]), alone[:rows]), rows


@DTYPES
@pytest.mark.parametrize("kind", ["fp8 blocks", "int4 zeros", "int8 blocks"])
def test_scales_of_groups_that_are_bfloat16_take_half_the_memory_and_give_the_same_bits(
    kind: str, dtype: torch.dtype
) -> None:
    weight = grouped(kind, 1104)
    small = replace(weight, scale=weight.scale.bfloat16().float())
    scale = small.scale.clone()
    scale[99, 3] = 0.123456789  # not bfloat16, so all scales of this weight are stored in float32
    wide = replace(small, scale=scale)
    one, other = Packed(small, None, dtype), Packed(wide, None, dtype)
    assert other.nbytes - one.nbytes == 128 * scale.shape[1] * 2, "outputs are stored in panels of 64"
    x = torch.randn(20, 1104, generator=torch.Generator().manual_seed(1)).to(dtype)
    for rows in (1, 20):
        assert torch.equal(one(x[:rows])[:, :99], other(x[:rows])[:, :99])


def test_what_is_beyond_a_sum_stays_in_its_row() -> None:
    """Rows with infinities and NaN, in any tile."""
    for kind in ("fp8", "nvfp4", "int4"):
        linear = Linear(grouped(kind, 80), dtype=torch.bfloat16)
        x = torch.randn(20, 80).bfloat16()
        x[3, 7], x[15, 9] = float("inf"), float("nan")
        y, others = linear(x), [row for row in range(20) if row not in (3, 15)]
        assert not bool(torch.isfinite(y[[3, 15]]).any())
        assert torch.equal(y[others], linear(x[others]))


@DTYPES
def test_int4_without_zero_points_takes_its_inputs_in_their_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    plain = quantise(torch.randn(70, 256, generator=generator), "int4")
    order = torch.randperm(256, generator=generator)
    weight = Quantised("int4", plain.values, plain.scale, 256, order=order)
    x = torch.randn(9, 256, generator=generator).to(dtype)
    exact = F.linear(x.double(), weight.dequantise(torch.float64))
    torch.testing.assert_close(Linear(weight, dtype=dtype)(x).double(), exact, rtol=0.02, atol=0.2)


def test_rounding_takes_a_weight_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same for any pieces; a piece has whole rows, however long they are."""
    import kernels.linear.rounding as rounding

    weight = torch.randn(3, 21, 144, generator=torch.Generator().manual_seed(2)).bfloat16()
    for kind in ("int8", "int4", "fp8", "nvfp4"):
        whole = quantise(weight, kind)
        for size in (1, 1000):
            monkeypatch.setattr(rounding, "PIECE", size)
            assert torch.equal(quantise(weight, kind).dequantise(), whole.dequantise())
        monkeypatch.undo()
        assert whole.shape == weight.shape
    with pytest.raises(ValueError, match=r"\(3, 21, 144\) holds values that are not finite"):
        quantise(torch.where(torch.arange(144) == 143, float("inf"), weight.float()), "nvfp4")


def test_packed_nvfp4_takes_a_scale_for_each_16_numbers_and_no_more() -> None:
    packed = Packed(quantise(torch.randn(128, 256), "nvfp4"), None, torch.bfloat16)
    assert packed.nbytes == 128 * 256 // 2 + 128 * 16 + 4 * 128
