"""The packed product equals the plain one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.linear import Linear, quantise


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


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 5])
def test_threads_share_a_product_and_change_nothing(kind: str | None, rows: int) -> None:
    """Few outputs of many inputs: panels are divided."""
    weight, x = torch.randn(100, 1100).bfloat16(), torch.randn(rows, 1100).bfloat16()
    linear = Linear(weight if kind is None else quantise(weight, kind))
    before, alone = torch.get_num_threads(), linear(x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(linear(x), alone)
    finally:
        torch.set_num_threads(before)
