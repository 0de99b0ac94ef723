"""The norms in Triton compared with their references in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.dispatch import forced
from kernels.rms_norm import add_rms_norm, reference, rms_norm

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 5), (2, 192), (5, 1000)], ids=str)
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, width + 3) * 3).to(dtype)[:, :width].to(DEVICE)
    weight = torch.randn(width, device=DEVICE)
    with forced("triton"), poisoned():
        found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype and found.shape == x.shape
    if rows:
        assert_as_good(found, exact_norm(x, weight), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    residual = torch.randn(3, 70, device=DEVICE).to(dtype)
    delta, weight = torch.randn(3, 70, device=DEVICE).bfloat16(), torch.randn(70, device=DEVICE)
    ours, plain = residual.clone(), residual.clone()
    with forced("triton"), poisoned():
        found = add_rms_norm(ours, delta, weight, 1e-5, torch.bfloat16)
    expected = reference.add_rms_norm(plain, delta, weight, 1e-5, torch.bfloat16)
    assert torch.equal(ours, plain)
    assert_as_good(found, exact_norm(plain, weight), expected)
