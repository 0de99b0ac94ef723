"""Activations of MLPs as functions of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.activation_names import COMPILED
from kernels.native.structs import Activation

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
    Activation.RELU: F.relu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU_QUICK: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.SILU: F.silu,
}
ACTIVATIONS = {name: _FUNCTIONS[activation] for name, activation in COMPILED.items()}
"""The function of each name that `COMPILED` has."""
