"""Steps of a convolution that can be rolled back equal one token after another; in Triton, the reference."""

from __future__ import annotations

import pytest
import torch
from mamba_inputs import by_definition
from torch import Tensor
from torch.nn import functional as F
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.conv_replay import conv_advance, conv_replay
from kernels.dispatch import forced
from kernels.scan_tables import ScanTables

CHANNELS, RING, NAN = 20, 16, float("nan")
BACKENDS = ["reference", "triton"]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def convolved(inputs_TC: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """By definition, in float64, without an activation."""
    full = torch.cat((window, inputs_TC)).double().t()[None]
    kernel = weight.double().t()[:, None]
    out = F.conv1d(full, kernel, None if bias is None else bias.double(), groups=full.shape[1])
    return out[0].t()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("taps", "biased"), [(2, True), (3, False), (4, True), (7, True)])
def test_rows_after_rings(backend: str, dtype: torch.dtype, taps: int, biased: bool) -> None:
    """A row with three valid steps, one with none, and padding; then the advance by four steps, and by none."""
    weight, bias = torch.randn(taps, CHANNELS, device=DEVICE), torch.randn(CHANNELS, device=DEVICE) if biased else None
    windows = torch.randn(5, taps - 1, CHANNELS, device=DEVICE).to(dtype)
    windows[[0, 3]] = NAN
    rings = torch.full((4, RING, CHANNELS), NAN, device=DEVICE)
    rings[2, :3] = torch.randn(3, CHANNELS, device=DEVICE).to(dtype).float()
    inputs = torch.randn(3, 4, CHANNELS, device=DEVICE).to(dtype)
    before, old = windows.clone(), rings.clone()
    where = (ints(2, 0, -1), ints(1, 4, -1), ints(3, 0, 0))
    with forced("triton" if backend == "triton" else "reference"), poisoned():
        found = conv_replay(windows, rings, *where, ints(4, 2, 0), inputs, weight, bias, 7)
    assert found.isfinite().all() and torch.equal(windows.nan_to_num(7.0), before.nan_to_num(7.0))
    steps = {0: torch.cat((old[2, :3], inputs[0].float())), 1: inputs[1, :2].float()}
    for row, (slot, skipped) in enumerate([(1, 3), (4, 0)]):
        exact = convolved(steps[row], before[slot], weight, bias)[skipped:]
        plain = exact.to(torch.float32 if backend == "reference" else dtype)
        assert_as_good(found[row, : exact.shape[0]], exact, plain)
    assert torch.equal(rings[2, :7], steps[0]) and torch.equal(rings[0, :2], steps[1])
    assert rings[[1, 3]].isnan().all() and rings[2, 7:].isnan().all() and rings[0, 2:].isnan().all()
    with forced("triton" if backend == "triton" else "reference"):
        conv_advance(windows, rings, *where[:2], ints(3, 4, -1), ints(4, 0, 0), weight, 7)
    assert torch.equal(windows[3], torch.cat((before[1].float(), steps[0][:4]))[-(taps - 1) :].to(dtype))
    assert torch.equal(windows[[1, 2, 4]], before[[1, 2, 4]]) and windows[0].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_convolutions_without_an_activation(backend: str) -> None:
    """In all three forms: SiLU of the result is that of the form with an activation."""
    weight, bias = torch.randn(3, CHANNELS, device=DEVICE), torch.randn(CHANNELS, device=DEVICE)
    pool, x = torch.randn(6, 2, CHANNELS, device=DEVICE), torch.randn(6, CHANNELS, device=DEVICE)
    tables = ScanTables.of([6], [0], 4, device=DEVICE)
    rows = (ints(0), torch.tensor([True], device=DEVICE), ints(0, 6), (), tables)

    def forms(silu: bool) -> list[Tensor]:
        given = (weight, bias)
        return [
            causal_conv1d(x, *given, pool.clone(), *rows, silu=silu),
            causal_conv1d_update(x, *given, pool.clone(), ints(*range(6)), silu=silu),
            causal_conv1d_tokens(x[None], *given, pool.clone(), ints(*range(6))[None], ints(1), ints(6), silu=silu)[0],
        ]

    with forced("triton" if backend == "triton" else "reference"), poisoned():
        plain, active = forms(False), forms(True)
    for one, other in zip(plain, active, strict=True):
        torch.testing.assert_close(F.silu(one), other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain[0].double(), convolved(x, pool[0], weight, bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(plain[0], plain[2])
    assert_as_good(active[0], by_definition(x, pool[0], weight, bias), active[0])
