"""The packed product equals the plain one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gates import swiglu
from kernels.linear import GatedLinear, Linear, Packed, Quantised, quantise
from kernels.native import Activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 63, 130), (40, 7, 5), (129, 64, 500)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_against_float64(dtype: torch.dtype, shape: tuple[int, int, int], biased: bool) -> None:
    rows, inner, outer = shape
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    bias = torch.randn(outer).to(dtype) if biased else None
    linear = Linear(weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    allowed = (F.linear(x, weight, bias).double() - exact).square().mean().sqrt()
    found = linear(x)
    assert found.dtype == dtype
    assert (found.double() - exact).square().mean().sqrt() <= 2 * allowed
    squared = linear.relu_squared(x).double()
    torch.testing.assert_close(
        squared, exact.relu().square(), rtol=0.03 if dtype == torch.bfloat16 else 1e-4, atol=1e-2
    )


def test_rows_of_a_wider_tensor() -> None:
    wide, weight = torch.randn(5, 100).bfloat16(), torch.randn(32, 64).bfloat16()
    part = wide[:, 20:84]
    assert torch.equal(Linear(weight)(part), Linear(weight)(part.contiguous()))


def test_weight_is_copied_unless_it_is_given_away() -> None:
    weight = torch.ones(4, 4)
    kept, shared = Linear(weight), Linear(weight, owned=True)
    weight.zero_()
    assert kept(torch.ones(1, 4)).sum() == 16
    assert shared(torch.ones(1, 4)).sum() == 0


def test_bias_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) does not fit 4"):
        Linear(torch.ones(4, 2), torch.ones(3))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8-32", "int4", "int4-32", "fp8", "nvfp4"])
def test_the_first_outputs_are_those_of_the_whole(kind: str, compiled: bool) -> None:
    """In the same memory: ends within a panel, at one, and at the last output."""
    weight, bias, x = torch.randn(200, 192), torch.randn(200), torch.randn(9, 192)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    stored = weight.to(dtype) if kind in ("float32", "bfloat16") else quantise(weight, kind)
    whole = Linear(stored, bias.to(dtype), compiled=compiled, dtype=dtype)
    expected = whole(x.to(dtype))
    for outputs in (1, 64, 100, 200):
        first = whole.first(outputs)
        assert first.out_features == outputs
        if whole.packed is not None:
            assert first.packed is not None and first.packed.n == outputs
            assert first.packed.descriptor.data == whole.packed.descriptor.data
        if compiled and kind != "float32":
            assert torch.equal(first(x.to(dtype)), expected[:, :outputs])
        else:  # torch may add in another order
            torch.testing.assert_close(first(x.to(dtype)), expected[:, :outputs], rtol=1e-2, atol=1e-2)
    assert torch.equal(whole(x.to(dtype)), expected)


KINDS = ["float32", "bfloat16", "int8", "int4"]


def linear_of(kind: str, weight: Tensor) -> tuple[Linear | Packed, torch.dtype]:
    """A compiled product, and the dtype of its rows."""
    if kind == "float32":
        return Packed(weight, None), torch.float32
    return Linear(weight.bfloat16() if kind == "bfloat16" else quantise(weight, kind)), torch.bfloat16


@pytest.mark.parametrize("again", [False, True])
def test_a_test_starts_with_one_thread_whatever_another_thread_has_set_before(again: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 1
        pool.submit(torch.set_num_threads, 2).result()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(100, 1100), (70, 77), (200, 256), (64, 3)], ids=str)
def test_a_row_is_the_same_in_any_company_and_with_any_threads(kind: str, shape: tuple[int, int]) -> None:
    """All tile heights, one and more blocks of rows, and panels whole and divided (few outputs of many inputs).

    Rows are shared by all threads, by some of them (600 rows, 6 or 64 threads), or each thread has its own.
    """
    generator = torch.Generator().manual_seed(8)
    linear, dtype = linear_of(kind, torch.randn(shape, generator=generator))
    x = torch.randn(600, shape[1], generator=generator).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for threads in (1, 2, 3, 6, 64):
        torch.set_num_threads(threads)
        few = range(1, 20) if threads < 64 else (1, 7)
        for rows in (*few, 25, 32, 48, 49, 191, 192, 193, 255, 256, 385, 600):
            assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (1100, 70), (77, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_product_is_two_products(kind: str, inner: int, outer: int, biased: bool) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight = torch.randn(2 * outer, inner).to(dtype) / inner**0.5
    bias = torch.randn(2 * outer).to(dtype) if biased else None
    stored = quantise(weight, kind) if kind.startswith("int") else weight
    gated = GatedLinear(stored, bias, swiglu, Activation.SILU)
    x = torch.randn(21, inner).to(dtype)
    exact = stored.dequantise() if isinstance(stored, Quantised) else stored.float()
    gate, up = F.linear(x.float(), exact, None if bias is None else bias.float()).chunk(2, -1)
    expected, found = F.silu(gate) * up, gated(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01 if dtype == torch.bfloat16 else 1e-5)
