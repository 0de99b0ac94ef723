"""Products of int8 rows with int8 and int4 weights: the reference, the product of each instruction set, refusals."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from decoder.config import DecoderOptions
from kernels.linear import GatedLinear, Linear, Packed, Quantised, check_int8_products, quantise
from kernels.linear.int8_rows import SMALLEST, int8_linear, to_int8
from kernels.linear.layouts import MOST_INPUTS, MOST_SHIFTED
from kernels.native import Activation, Kind, NativeUnavailable

DTYPES = (torch.float32, torch.bfloat16)


def int8(outputs: int, inner: int, seed: int = 0) -> Quantised:
    """With all values of a byte, -128 included, which published files may hold."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (outputs, inner), dtype=torch.int8, generator=generator)
    return Quantised("int8", values, torch.rand(outputs, 1, generator=generator) * 0.1, inner, inner)


def in_groups(
    kind: str, outputs: int, inner: int, group: int, seed: int = 0, *, zeros: bool = False, ordered: bool = False
) -> Quantised:
    """int8 or int4 with all values of a byte or of four bits and, as options, all zero points and inputs in another
    order."""
    generator = torch.Generator().manual_seed(seed)
    groups, of_bytes = -(-inner // group), kind == "int8"
    octets = torch.randint(0, 256, (outputs, inner if of_bytes else -(-inner // 2)), generator=generator).byte()
    points = torch.randint(0, 256 if of_bytes else 17, (outputs, groups), generator=generator).byte()
    return Quantised(
        kind,
        octets.view(torch.int8) if of_bytes else octets,
        torch.rand(outputs, groups, generator=generator) * 0.1,
        inner,
        group,
        zeros=points if zeros else None,
        order=torch.randperm(inner, generator=generator) if ordered else None,
    )


def rows_of(count: int, inner: int, seed: int) -> Tensor:
    """Rows of very different sizes, one of zeros and one whose numbers are all at the ends."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inner, generator=generator) * torch.logspace(-3, 3, count)[:, None]
    x[count // 2] = 0
    if count > 1:
        x[-1] = torch.randint(0, 2, (inner,), generator=generator) * 2.0 - 1
    return x


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), inner=st.integers(1, 300), outer=st.integers(1, 140), biased=st.booleans(),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_the_compiled_product_has_the_bits_of_the_reference(
    rows: int, inner: int, outer: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    weight, x = int8(outer, inner, seed), rows_of(rows, inner, seed).to(dtype)
    bias = torch.randn(outer, generator=torch.Generator().manual_seed(seed)).to(dtype) if biased else None
    try:
        packed = Packed(weight, bias, int8_rows=True)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    assert packed.kind is Kind.BYTES and packed.stored is Kind.INT8
    assert torch.equal(packed(x), int8_linear(x, weight, bias))


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(("int8", "int4")), rows=st.integers(1, 40), inner=st.integers(1, 300),
    outer=st.integers(1, 140), group=st.sampled_from((32, 64, 96, 128, 512)), zeros=st.booleans(),
    ordered=st.booleans(), biased=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_the_product_with_groups_has_the_bits_of_the_reference(
    kind: str, rows: int, inner: int, outer: int, group: int, zeros: bool, ordered: bool, biased: bool, seed: int
) -> None:
    group = min(group, inner) if kind == "int8" else group
    weight, x = in_groups(kind, outer, inner, group, seed, zeros=zeros, ordered=ordered), rows_of(rows, inner, seed)
    bias = torch.randn(outer, generator=torch.Generator().manual_seed(seed)) if biased else None
    try:
        packed = Packed(weight, bias, torch.bfloat16, int8_rows=True)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    if kind == "int4" or zeros or group < inner:
        assert packed.kind is Kind.SUMMED_BYTES and packed.stored is (Kind.UINT8 if kind == "int8" else Kind.INT4)
    assert torch.equal(packed(x), int8_linear(x, weight, bias))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_of_groups_is_rounded_once_for_each_group(sign: int) -> None:
    """1 + (2^36 + 1) / 2^60 is above the middle of 1 and the next number, but a float64 would be the middle."""
    numbers, x = torch.full((1, 64), 8, dtype=torch.uint8), torch.zeros(1, 64)
    numbers[0, 0], x[0, 0] = 9, sign  # 1 * 1
    numbers[0, 32:40], x[0, 32:40] = 12, 127 * sign  # 8 * 4 * 127; the scale of the row is 1
    numbers[0, 40], x[0, 40] = 9, 33 * sign  # 4,097 with this
    assert 4097 * 16_773_121 == 2**36 + 1
    scale = torch.tensor([[1.0, 16_773_121 * 2.0**-60]])
    weight = Quantised("int4", numbers[:, ::2] | numbers[:, 1::2] << 4, scale, 64, 32)
    assert int8_linear(x, weight, None).item() == sign * (1 + 2.0**-23)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_groups_without_a_compiled_product_are_multiplied_by_the_reference(kind: str) -> None:
    inner = MOST_SHIFTED + 1
    weight, x = in_groups(kind, 5, inner, inner, zeros=True), rows_of(2, inner, 1)
    with pytest.raises(NativeUnavailable):
        Packed(weight, None, int8_rows=True)
    assert torch.equal(Linear(weight, activations="int8")(x), int8_linear(x, weight, None))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("compiled", [True, False])
def test_groups_that_do_not_fill_sums_keep_their_rows(kind: str, compiled: bool) -> None:
    weight, x = in_groups(kind, 6, 48, 16), rows_of(2, 48, 1)
    with pytest.raises(NativeUnavailable, match="groups of 16 inputs are not multiples of 32"):
        Packed(weight, None, int8_rows=True)
    linear, same = (Linear(weight, compiled=compiled, activations=of) for of in ("int8", None))
    assert torch.equal(linear(x), same(x)) and not torch.equal(linear(x), int8_linear(x, weight, None))
    gated, plain = (
        GatedLinear(weight, None, lambda rows: rows[:, :3] * rows[:, 3:], Activation.SILU, activations=of)
        for of in ("int8", None)
    )
    assert torch.equal(gated(x), plain(x))


ANY = [
    *(int8(130, inner) for inner in (1, 3, 16, 62, 768, 1284)),
    *(in_groups(kind, 130, inner, group, zeros=zeros) for kind in ("int8", "int4")
      for inner, group in ((31, 32), (768, 32), (640, 128), (1284, 1284)) for zeros in (False, True)),
]  # fmt: skip


@cache
def rows_and_products(weight: Quantised) -> list[tuple[Tensor, Tensor]]:
    """Rows, and their products with the weight by the reference, which are the same for each instruction set."""
    several = [rows_of(rows, weight.in_features, rows) for rows in (1, 2, 3, 4, 5, 6, 7, 33, 200)]
    return [(x, int8_linear(x, weight, None)) for x in several]


def named(weight: Quantised) -> str:
    group = f"-{weight.group}" if weight.in_groups or weight.kind == "int4" else ""
    return f"{weight.kind}{group}-{weight.in_features}{'' if weight.zeros is None else '-zeros'}"


@pytest.mark.parametrize("weight", ANY, ids=named)
def test_each_set_has_the_same_bits_for_any_rows_and_threads(chosen: str, weight: Quantised) -> None:
    packed = Packed(weight, None, int8_rows=True)
    for x, exact in rows_and_products(weight):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(packed(x), exact), f"{len(x)} rows, {threads} threads"
        assert torch.equal(packed(x[-1:])[0], exact[-1])


@pytest.mark.parametrize("value", [-128, 127])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sums_of_the_largest_numbers_are_exact(chosen: str, value: int, sign: int) -> None:
    weight = Quantised(
        "int8", torch.full((3, MOST_INPUTS), value, dtype=torch.int8), torch.ones(3, 1), MOST_INPUTS, MOST_INPUTS
    )
    x = torch.full((2, MOST_INPUTS), 127.0 * sign)  # the scale is 1
    expected = torch.tensor(value * 127 * sign * MOST_INPUTS).float()
    assert torch.equal(Packed(weight, None, int8_rows=True)(x), expected.expand(2, 3))


def test_a_row_is_rounded_by_its_own_largest_number() -> None:
    x = torch.tensor([[127.0, 1.4, -1.5, 2.5], [-0.254, 0.002, 0.0, 0.0], [0.0] * 4, [1e-44] * 4])
    values, scale = to_int8(x)
    assert values.tolist()[:2] == [[127, 1, -2, 2], [-127, 1, 0, 0]] and not bool(values[2].any())
    assert scale[:2].flatten().tolist() == pytest.approx([1.0, 0.002])
    assert scale[2:].flatten().tolist() == pytest.approx([SMALLEST / 127] * 2, rel=1e-6, abs=0)
    assert torch.equal(Linear(int8(5, 4), activations="int8")(x)[2], torch.zeros(5))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_longest_groups_of_the_largest_numbers_are_exact(chosen: str, zeros: bool, sign: int) -> None:
    """Sums of up to 32 bits, which are rounded once."""
    inner, zero = MOST_SHIFTED if zeros else MOST_INPUTS, torch.tensor([[0], [1], [15]], dtype=torch.uint8)
    int4 = Quantised(
        "int4", torch.full((3, -(-inner // 2)), 255, dtype=torch.uint8), torch.ones(3, 1), inner, inner,
        zeros=zero if zeros else None,
    )  # fmt: skip
    values = torch.tensor([127, -128, 127], dtype=torch.int8)[:, None].repeat(1, MOST_SHIFTED)
    ends = torch.tensor([[0], [255], [255]], dtype=torch.uint8)
    int8 = Quantised("int8", values, torch.ones(3, 1), MOST_SHIFTED, MOST_SHIFTED, zeros=ends)
    for weight, numbers in ((int4, [15, 14, 0] if zeros else [7, 7, 7]), (int8, [255, -255, 0])):
        x = torch.full((2, weight.in_features), 127.0 * sign)  # the scale is 1
        expected = torch.tensor(numbers).double() * 127 * sign * weight.in_features
        assert torch.equal(Packed(weight, None, int8_rows=True)(x), expected.float().expand(2, 3)), weight.kind


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "weight", [int8(70, 200), *(in_groups(kind, 70, 200, 32) for kind in ("int8", "int4"))], ids=named
)
def test_what_is_not_a_number_is_not_lost(weight: Quantised, value: float, compiled: bool) -> None:
    x = rows_of(3, 200, 1)
    linear = Linear(weight, compiled=compiled, activations="int8")
    sound = linear(x)
    x[0, 7] = value
    y = linear(x)
    assert bool(torch.isnan(y[0]).all())
    assert torch.equal(y[1:], sound[1:])


@pytest.mark.parametrize("kind", ["int8", "int8-32", "int4", "int4-32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_is_close_to_one_with_rows_of_16_bits(dtype: torch.dtype, kind: str) -> None:
    weight, x = quantise(torch.randn(72, 256), kind), torch.randn(9, 256).to(dtype)
    linear, slow = (Linear(weight, dtype=dtype, activations="int8", compiled=on) for on in (True, False))
    assert torch.equal(linear(x), slow(x))
    exact = x.double() @ weight.dequantise().double().t()
    assert 1e-3 < float((linear(x).double() - exact).norm() / exact.norm()) < 0.02

    def product(rows: Tensor) -> Tensor:
        return F.silu(rows[:, :36].float()) * rows[:, 36:].float()

    gated = GatedLinear(weight, None, product, Activation.SILU, dtype=dtype, activations="int8")
    assert float((gated(x).double() - product(exact)).norm() / product(exact).norm()) < 0.03


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_other_weights_keep_their_rows(kind: str) -> None:
    weight, x = quantise(torch.randn(48, 128), kind), torch.randn(2, 128)
    assert torch.equal(Linear(weight, activations="int8")(x), Linear(weight)(x))


@pytest.mark.parametrize("kind", ["int8", "int8-32", "int4", "int4-32"])
def test_a_weight_takes_no_more_memory(kind: str) -> None:
    weight = quantise(torch.randn(256, 512), kind)
    expected = {
        "int8": 256 * 512 + 4 * 256, "int8-32": 256 * (512 + 2 * 16), "int4": 256 * (256 + 2 * 4),
        "int4-32": 256 * (256 + 2 * 16),
    }  # fmt: skip
    try:
        sizes = {Packed(weight, None, torch.bfloat16, int8_rows=on).nbytes for on in (True, False)}
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    assert sizes == {expected[kind]}


def test_elsewhere_it_is_refused() -> None:
    check_int8_products(torch.device("cpu"))
    with pytest.raises(ValueError, match="activations int8 needs a CPU, but the device is cuda"):
        check_int8_products(torch.device("cuda"))
    with pytest.raises(ValueError, match="activations 'int4' is not one of fp8, int8"):
        DecoderOptions(activations="int4")
