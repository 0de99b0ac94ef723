"""RMS norm, and the gated norm over groups of channels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gated_norm import gated_norm
from kernels.rms_norm import rms_norm


def exact(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("rows", [1, 63, 300, 600])
def test_rms_norm(rows: int) -> None:
    x, weight = torch.randn(rows, 48), torch.rand(48)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bfloat16_computes_in_float32() -> None:
    x, weight = torch.randn(300, 48).bfloat16(), torch.rand(48)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, rms_norm(x, weight, 1e-5, torch.float32).bfloat16())
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5, torch.float32).double(), exact(x, weight, 1e-5), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("value", [0.0, 1e-18, 1e15], ids=str)
def test_rms_norm_of_extreme_rows_is_finite(value: float) -> None:
    assert rms_norm(torch.full((2, 8), value), torch.ones(8), 1e-5).isfinite().all()


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_gate_with_a_factor(groups: int, rows: int, dtype: torch.dtype) -> None:
    """Before the norm, behind it and without one."""
    y, gate, weight = torch.randn(rows, 40), torch.randn(rows, 40).to(dtype), torch.rand(40)
    silu, size, kept = F.silu(1.7 * gate.double()), 40 // groups, gate.clone()
    for norm_first in (True, False):
        value = (y.double() * (1.0 if norm_first else silu)).view(rows, groups, -1)
        expected = exact(value, torch.ones(size), 1e-5).view(rows, -1) * weight * (silu if norm_first else 1.0)
        given = {"norm_first": norm_first, "gate_scale": 1.7}
        found = gated_norm(y, gate, weight, size, 1e-5, torch.float32, **given)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    bare = gated_norm(y, gate, None, size, 1e-5, torch.float32, gate_scale=1.7)
    torch.testing.assert_close(bare.double(), y.double() * silu, rtol=1e-4, atol=1e-5)
    plain = gated_norm(y, gate, None, size, 1e-5, torch.float32)
    torch.testing.assert_close(plain.double(), y.double() * F.silu(gate.double()), rtol=1e-4, atol=1e-5)
    assert torch.equal(gate, kept), "the gate is the caller's"


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gated_norm(groups: int, rows: int, dtype: torch.dtype) -> None:
    y, gate, weight = torch.randn(rows, 40), torch.randn(rows, 40).to(dtype), torch.rand(40)
    kept = gate.clone()
    found = gated_norm(y, gate, weight, 40 // groups, 1e-5, torch.float32)
    value = (y.double() * F.silu(gate.double())).view(rows, groups, -1)
    expected = exact(value, torch.ones(40 // groups), 1e-5).view(rows, -1) * weight
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(gate, kept), "the gate is the caller's"
    assert gated_norm(y, gate, weight, 40 // groups, 1e-5).dtype == dtype
