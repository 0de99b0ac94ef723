"""Quantised products compared with float64, within the limit of rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kernels.linear import (
    GatedLinear,
    Linear,
    Packed,
    Quantised,
    concatenate,
    quantise,
    quantised_bytes,
    row_part,
    stack,
)
from kernels.linear.layouts import MOST_INPUTS
from kernels.native import Activation, NativeUnavailable

SHAPES = st.tuples(st.integers(1, 20), st.integers(1, 300), st.integers(1, 140))


def step_of(packed: Quantised) -> torch.Tensor:
    """`[n, k]`: the distance between two representable values of a weight."""
    scale = packed.scale.abs()
    return scale.repeat_interleave(packed.group, 1)[:, : packed.in_features]


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(["int8", "int8-32", "int4"]), st.integers(0, 2**31))
def test_a_weight_is_close_to_what_is_stored(shape: tuple[int, int, int], kind: str, seed: int) -> None:
    _, inner, outer = shape
    weight = torch.randn(outer, inner, generator=torch.Generator().manual_seed(seed))
    packed = quantise(weight, kind)
    assert packed.shape == weight.shape
    error = (packed.dequantise() - weight).abs()
    if kind == "int8-32":  # its scale is rounded too, so that the largest value may be beyond 127 steps
        assert bool((error <= 0.76 * step_of(packed) + 1e-12).all())
        return
    if kind == "int8":
        assert bool((error <= 0.501 * step_of(packed) + 1e-12).all())
        return
    # int4 may cut a fifth off the ends of a group, where that makes the sum of squares smaller than with the scale that
    # cuts nothing but the side that has only 7 steps.
    assert bool((error <= (1 + 8 * 0.25 + 1e-3) * step_of(packed) + 1e-12).all())
    groups = F.pad(weight, (0, -inner % 128)).unflatten(-1, (-1, 128))
    widest = groups.abs().amax(-1, keepdim=True) / 8
    uncut = (groups / widest).round().clamp(-8, 7).mul(widest).sub(groups).square().sum()
    flipped = (groups / -widest).round().clamp(-8, 7).mul(-widest).sub(groups).square().sum()
    assert error.square().sum() <= 1.001 * max(uncut, flipped)


@pytest.mark.parametrize(("inner", "groups"), [(96, 3), (100, 4), (256, 8), (8, 1)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_groups_of_32_are_finer(kind: str, inner: int, groups: int) -> None:
    weight = torch.randn(70, inner, generator=torch.Generator().manual_seed(inner))
    fine, coarse = quantise(weight, f"{kind}-32"), quantise(weight, kind)
    assert (fine.kind, fine.group, fine.scale.shape) == (kind, 32, (70, groups))
    assert fine.nbytes == quantised_bytes(weight.shape, f"{kind}-32")
    for begin in range(0, inner, 32):  # each group is as if it were alone
        part = slice(begin, begin + 32)
        torch.testing.assert_close(
            fine.dequantise()[:, part], quantise(weight[:, part], f"{kind}-32").dequantise(), rtol=0, atol=0
        )
    if groups > 1:
        assert (fine.dequantise() - weight).norm() < 0.95 * (coarse.dequantise() - weight).norm()
    x = torch.randn(3, inner).bfloat16()
    exact = x.double() @ fine.dequantise(torch.float64).t()
    found = Linear(fine, dtype=torch.bfloat16)(x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(["int8", "int4"]), st.booleans(), st.integers(0, 2**31))
def test_the_product_is_that_of_the_quantised_weight(
    shape: tuple[int, int, int], kind: str, biased: bool, seed: int
) -> None:
    rows, inner, outer = shape
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inner, generator=generator), torch.randn(outer, inner, generator=generator)
    bias = torch.randn(outer, generator=generator) if biased else None
    packed = quantise(weight, kind)
    exact = F.linear(x.double(), packed.dequantise(torch.float64), None if bias is None else bias.double())
    # Each input is rounded to 1 / 65278 of the row's largest; sums are exact but for float32 at the end.
    bound = x.abs().amax(1, keepdim=True) / 65278 * packed.dequantise().abs().sum(1) + 1e-5 * exact.abs() + 1e-5
    assert bool(((Linear(packed, bias)(x) - exact).abs() <= 1.01 * bound).all())
    squared = Linear(packed, bias).relu_squared(x).double()
    torch.testing.assert_close(squared, exact.relu().square(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_long_sums_do_not_overflow(kind: str, sign: int) -> None:
    """The largest number of inputs, each with the largest value."""
    inner = MOST_INPUTS
    values = (
        torch.full((3, inner), -128, dtype=torch.int8) if kind == "int8" else torch.zeros(3, (inner + 1) // 2).byte()
    )
    group = inner if kind == "int8" else 128
    packed = Quantised(kind, values, torch.ones(3, -(-inner // group)), inner, group)
    x = sign * torch.ones(2, inner)
    expected = -(128.0 if kind == "int8" else 8.0) * sign * inner
    for row in (x, x.clone().fill_diagonal_(-0.999 * sign)):  # all bytes, high and low, at either end
        torch.testing.assert_close(Linear(packed)(row), torch.full((2, 3), expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("inner", [5, 256, 260, 2000, MOST_INPUTS])
@pytest.mark.parametrize("value", [None, -128, 127])
def test_sums_with_rows_of_16_bits_are_exact_and_rounded_once(chosen: str, value: int | None, inner: int) -> None:
    """Whole numbers up to the 32,639 steps of a row are rows as they are."""
    generator = torch.Generator().manual_seed(inner)
    x = torch.randint(-32639, 32640, (7, inner), generator=generator)
    outputs = 70 if inner < MOST_INPUTS else 3
    weight = torch.randint(-128, 128, (outputs, inner), generator=generator)
    if value is not None:
        x, weight = x.sign() * 32639, torch.full_like(weight, value)
        x[0], x[1] = 32639, -32639
    x[:, 0] = 32639
    product = Packed(Quantised("int8", weight.to(torch.int8), torch.ones(outputs, 1), inner, inner), None)
    exact = (x.double() @ weight.double().t()).float()
    for rows in (1, 2, 3, 7):
        assert torch.equal(product(x[:rows].float()), exact[:rows])


def test_more_inputs_than_sums_can_hold_have_no_compiled_product() -> None:
    long = quantise(torch.ones(1, MOST_INPUTS + 1), "int8")
    with pytest.raises(NativeUnavailable, match="131072 inputs are more than the 131071"):
        Packed(long, None)
    torch.testing.assert_close(Linear(long)(torch.ones(1, MOST_INPUTS + 1)), torch.full((1, 1), MOST_INPUTS + 1.0))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_compiled_and_expanded_products_agree(kind: str) -> None:
    packed, x = quantise(torch.randn(70, 256), kind), torch.randn(9, 256)
    linear, short = Linear(packed), x.bfloat16()
    torch.testing.assert_close(linear(x), F.linear(x, packed.dequantise()), rtol=1e-3, atol=2e-3)
    if linear.packed is not None:
        assert torch.equal(linear(short), linear(short.float()).bfloat16())
    else:  # expanded in bfloat16: each weight is rounded
        torch.testing.assert_close(linear(short).float(), linear(short.float()), rtol=0.02, atol=0.3)


def test_parts_are_joined_as_they_are() -> None:
    weights = [torch.randn(6, 40) for _ in range(3)]
    for kind in ("int8", "int4"):
        joined, stacked = (join([quantise(w, kind) for w in weights]) for join in (concatenate, stack))
        assert isinstance(joined, Quantised) and isinstance(stacked, Quantised)
        assert torch.equal(joined.dequantise(), quantise(torch.cat(weights), kind).dequantise())
        assert torch.equal(stacked[1].dequantise(), quantise(weights[1], kind).dequantise())
    with pytest.raises(ValueError, match="not all quantised in the same way"):
        concatenate([weights[0], quantise(weights[1], "int8")])


def ordered(outputs: int, inner: int, group: int, zeros: bool) -> Quantised:
    """As GPTQ's act-order and compressed-tensors' `weight_g_idx` store a weight."""
    groups = outputs, inner // group
    points = torch.randint(0, 17, groups, dtype=torch.uint8) if zeros else None
    octets = torch.randint(0, 256, (outputs, inner // 2), dtype=torch.uint8)
    return Quantised("int4", octets, torch.rand(groups), inner, group, points, order=torch.randperm(inner))


@pytest.mark.parametrize(("group", "zeros"), [(32, True), (32, False), (128, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_in_another_order_stay_packed(group: int, zeros: bool, dtype: torch.dtype) -> None:
    """Groups of 128 without zero points have a product of their own."""
    weight, x = ordered(72, 256, group, zeros), torch.randn(5, 256).to(dtype)
    exact = x.double() @ weight.dequantise().double().T
    linear = Linear(weight, dtype=dtype)
    bound = 1e-3 if dtype == torch.float32 else 2**-7
    assert float((linear(x).double() - exact).abs().max()) <= bound * float(exact.abs().max())
    gated = GatedLinear(weight, None, lambda rows: F.silu(rows[:, :36]) * rows[:, 36:], Activation.SILU, dtype=dtype)
    expected = F.silu(exact[:, :36]) * exact[:, 36:]
    assert float((gated(x).double() - expected).abs().max()) <= 2 * bound * float(expected.abs().max())
    if linear.packed is None:
        pytest.skip("this machine has no compiled products")
    assert linear.packed.nbytes <= 0.4 * 2 * 128 * 256, "72 outputs take the memory of two panels of 64"
    with pytest.raises(NativeUnavailable, match="permutes"):
        linear.packed.descriptor  # noqa: B018


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_part_of_each_group_of_rows_is_taken_as_of_the_plain_weight(kind: str, place: int) -> None:
    """For example if heads have a query and a gate: of 3 heads, 2 parts of 5 rows each."""
    weight = torch.randn(30, 130)
    whole = quantise(weight, kind).dequantise()
    expected = whole.view(3, 2, 5, 130)[:, place].reshape(15, 130)
    assert torch.equal(quantise(weight, kind).row_part(place, 2, 3).dequantise(), expected)
    assert torch.equal(row_part(weight, place, 2, 3, dim=-2), weight.view(3, 2, 5, 130)[:, place].reshape(15, 130))
    assert torch.equal(row_part(weight[:, 0], place, 2, 3, dim=-1), weight[:, 0].view(3, 2, 5)[:, place].reshape(15))
    two = whole.view(3, 5, 2, 130)[:, place + 1 : place + 3].reshape(12, 130)
    assert torch.equal(quantise(weight, kind).row_part(place + 1, 5, 3, 2).dequantise(), two)


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ValueError, match="'int3' is not one of int8, int8-32, int4"):
        quantise(torch.ones(2, 2), "int3")
    with pytest.raises(ValueError, match=r"\(1, 2\) holds values that are not finite"):
        quantise(torch.tensor([[1.0, float("nan")]]), "int8")


def test_zeros_stay_zeros() -> None:
    for kind in ("int8", "int4"):
        assert not bool(Linear(quantise(torch.zeros(3, 8), kind))(torch.ones(1, 8)).any())
        assert not bool(Linear(quantise(torch.ones(3, 8), kind))(torch.zeros(1, 8)).any())


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_a_number_is_not_lost(kind: str, value: float) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 200, generator=generator)
    x[1, 7] = value
    linear = Linear(quantise(torch.randn(70, 200, generator=generator), kind))
    y = linear(x)
    assert not bool(torch.isfinite(y[1]).any())
    assert torch.equal(y[[0, 2]], linear(x[[0, 2]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_rows_of_other_dtypes_are_multiplied_too(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    linear = Linear(quantise(torch.randn(70, 200, generator=generator), "int8"))
    x = torch.randn(3, 200, generator=generator).to(dtype)
    assert linear(x).dtype == dtype
    torch.testing.assert_close(linear(x).float(), linear(x.float()), rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_elsewhere_have_no_compiled_product(kind: str) -> None:
    elsewhere = quantise(torch.ones(4, 8), kind).to("meta")
    with pytest.raises(NativeUnavailable, match="meta"):
        Packed(elsewhere, None)
    assert Linear(elsewhere).packed is None


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_parts_that_do_not_belong_together_are_refused(kind: str) -> None:
    whole = quantise(torch.randn(70, 200), kind)
    for values, scale in (
        (whole.values, whole.scale.bfloat16()),
        (whole.values, whole.scale[:-1]),
        (whole.values[:-1], whole.scale),
        (whole.values[:, :-1], whole.scale),
        (whole.values.short(), whole.scale),
    ):
        with pytest.raises(ValueError, match=f"of an {kind} weight: torch.*, but must be torch"):
            Quantised(kind, values, scale, 200, whole.group)
    with pytest.raises(ValueError, match="'int3' is not one of int8, int4"):
        Quantised("int3", whole.values, whole.scale, 200)
