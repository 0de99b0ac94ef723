"""The activations of compiled products against torch in float64."""

from __future__ import annotations

import pytest
import torch
from compiled import needs_compiled
from torch.nn import functional as F

from kernels.linear import Packed
from kernels.native import Activation

pytestmark = needs_compiled
EXACT = {
    Activation.NONE: lambda x: x,
    Activation.RELU_SQUARED: lambda x: x.relu().square(),
    Activation.RELU: F.relu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_QUICK: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.SILU: F.silu,
}


@pytest.mark.parametrize("activation", Activation, ids=lambda activation: activation.name.lower())
def test_every_activation_of_a_product(activation: Activation) -> None:
    """One input of weight 1: the output is the activation itself, on numbers of every size, and NaN stays NaN."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-90.0, 90.0, 1e-6, float("nan")])])[:, None]
    found = Packed(torch.ones(3, 1), None)(x, activation).double()
    exact = EXACT[activation](x.double()).expand(-1, 3)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=4e-6, equal_nan=True)
