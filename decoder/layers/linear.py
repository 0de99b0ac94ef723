"""Helpers to lay weights out: linear layers in the options' dtype or quantised, vectors in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from decoder.config import DecoderOptions
from decoder.layers import descriptions
from decoder.layers.spec import Weights
from kernels.gates import swiglu
from kernels.linear import GatedLinear, Linear, Quantised, quantise
from kernels.native import Activation

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
COMPILED = {
    "relu2": Activation.RELU_SQUARED,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
"""The same in compiled code."""
assert tuple(ACTIVATIONS) == tuple(COMPILED) == descriptions.ACTIVATIONS


def _stored(
    weight: Tensor | Quantised, bias: Tensor | None, options: DecoderOptions
) -> tuple[Tensor | Quantised, Tensor | None]:
    """As the options, or the checkpoint, want them. `ValueError` where they differ."""
    if isinstance(weight, Quantised):
        if options.weights not in (None, weight.kind):
            raise ValueError(f"weights {options.weights} was asked for and the checkpoint holds {weight.kind}")
        weight = weight.to(options.device)
    elif options.weights is not None:
        weight = quantise(weight, options.weights).to(options.device)
    else:
        weight = weight.to(options.device, options.dtype)
    return weight, None if bias is None else bias.to(options.device, options.dtype)


def stored_linear(
    weight: Tensor | Quantised, bias: Tensor | None, options: DecoderOptions, *, owned: bool = False
) -> Linear:
    """A linear layer with its weights as the options, or the checkpoint, want them. `ValueError` where they differ.

    `owned`: the weight may be kept instead of copied.
    """
    return Linear(*_stored(weight, bias, options), owned=owned, dtype=options.dtype)


def gated_linear(gate_up: Tensor | Quantised, bias: Tensor | None, act: str, options: DecoderOptions) -> GatedLinear:
    """The same for gates, then as many outputs that they are for, which nobody else keeps."""
    product = swiglu if act == "silu" else _product(act)
    return GatedLinear(*_stored(gate_up, bias, options), product, COMPILED[act], dtype=options.dtype)


def _product(act: str) -> Callable[[Tensor], Tensor]:
    """Rows of gates and of what they are for -> their products."""
    function = ACTIVATIONS[act]

    def product(rows_TI: Tensor) -> Tensor:
        gate, up = rows_TI.chunk(2, dim=-1)
        return function(gate) * up

    return product


def named_linear(weights: Weights, name: str, options: DecoderOptions) -> Linear:
    """The linear layer `name` of these weights, with its bias where there is one."""
    return stored_linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), options)


def float_vector(weights: Weights, name: str, options: DecoderOptions) -> Tensor:
    """A copy in float32 on the device."""
    return weights[name].to(device=options.device, dtype=torch.float32, copy=True)
