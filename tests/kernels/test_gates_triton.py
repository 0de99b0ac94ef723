"""Norms and rotation of heads, and gated products, in Triton compared with float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.dispatch import forced
from kernels.gates import add_gated, sigmoid_gate, swiglu
from kernels.gates import reference as gates_reference
from kernels.rotary import Rope, norm_rotate, reference, rope_table, rotate
from kernels.rotary.kernel import axis_masks

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    with DEVICE:
        yield


def exact_turn(x_THP: Tensor, rope: Rope, positions_TA: Tensor) -> Tensor:
    """Each pair as a complex number, rotated."""
    x, half = x_THP.double(), rope.dims // 2
    out = x.clone()
    for i in range(half):
        at = positions_TA[:, rope.axes[i] if rope.axes else 0].clamp(min=0).double()
        # The table's angles are float32.
        angle = (at.float() * (1.0 / rope.theta ** torch.tensor(2 * i / rope.dims))).double()
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        out[..., i] = x[..., i] * cos - x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
    return out


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "rope"),
    [
        pytest.param(16, Rope(16, 100.0), id="whole-head"),
        pytest.param(24, Rope(8, 100.0, (0, 1, 2, 0)), id="three-axes"),
        pytest.param(256, Rope(64, 1e7, tuple(i % 3 for i in range(32))), id="interleaved-64-of-256"),
        pytest.param(12, None, id="no-positions"),
    ],
)
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_and_turned(width: int, rope: Rope | None, normed: bool, dtype: torch.dtype) -> None:
    heads, keys, tokens = 3, 2, 5
    x = torch.randn(tokens, heads + 2 * keys, width).to(dtype)[:, : heads + keys]
    at = torch.tensor([[0, 0, 0], [7, 7, 7], [3, 9, 30], [-1, -1, -1], [31, 2, 5]])
    weights = (torch.rand(width) + 0.5, torch.rand(width) + 0.5)
    table = None if rope is None else rope_table(rope, 32, str(DEVICE))
    given = (x, heads, weights if normed else None, 1e-6, table, at, () if rope is None else rope.axes)
    with poisoned(), forced("triton"):
        found = norm_rotate(*given)
    plain = reference.norm_rotate(*given)
    exact = x.double()
    if normed:
        exact = torch.cat((exact_norm(x[:, :heads], weights[0], 1e-6), exact_norm(x[:, heads:], weights[1], 1e-6)), 1)
    if rope is not None:
        exact = exact_turn(exact, rope, at)
    assert found.dtype == dtype and found.is_contiguous()
    assert_as_good(found, exact, plain)
    if rope is not None and not normed:
        with forced("triton"):
            assert torch.equal(rotate(x, *given[4:]), found)


def test_axes_that_the_masks_cannot_hold_are_refused() -> None:
    assert axis_masks(()) == axis_masks((0,) * 100) == (0, 0) and axis_masks((0, 1, 2, 1)) == (0b1010, 0b0100)
    with pytest.raises(ValueError, match="3 axes .* the model has 4"):
        axis_masks((0, 3))
    with pytest.raises(ValueError, match="63 frequencies, but the model has 3 and 64"):
        axis_masks((2,) * 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1300])
def test_gates(width: int, dtype: torch.dtype) -> None:
    wide = torch.randn(3, 2 * width + 1).to(dtype) * 3
    x, gate = wide[:, :width], wide[:, width : 2 * width]
    with poisoned(), forced("triton"):
        gated, mixed = sigmoid_gate(x, gate), swiglu(wide[:, : 2 * width])
    assert_as_good(gated, x.double() * torch.sigmoid(gate.double()), gates_reference.sigmoid_gate(x, gate))
    assert_as_good(mixed, F.silu(x.double()) * gate.double(), gates_reference.swiglu(wide[:, : 2 * width]))


@pytest.mark.parametrize(("heads", "width"), [(3, 5), (10, 130)])
def test_heads_have_a_gate_each(heads: int, width: int) -> None:
    x, gate = torch.randn(3, heads * width), torch.randn(3, heads + 1)[:, :heads]
    with poisoned(), forced("triton"):
        found = sigmoid_gate(x, gate)
    expected = x.double().view(3, heads, width) * torch.sigmoid(gate.double())[:, :, None]
    assert_as_good(found, expected.flatten(1), gates_reference.sigmoid_gate(x, gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 1300])
def test_a_gated_expert_is_added(width: int, dtype: torch.dtype) -> None:
    routed, shared, x = (torch.randn(4, width).to(dtype) for _ in range(3))
    weight = torch.randn(1, width) / width**0.5
    with poisoned(), forced("triton"):
        found = add_gated(routed, shared, x, weight)
    exact = routed.double() + torch.sigmoid(x.double() @ weight.double().T) * shared.double()
    assert_as_good(found, exact, gates_reference.add_gated(routed, shared, x, weight))
