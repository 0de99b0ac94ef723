"""MLP: `down(act(up(x)))`, or gated, `down(act(gate(x)) * up(x))`."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder.batch import Batch
from decoder.config import DecoderOptions
from decoder.layers.descriptions import Mlp
from decoder.layers.linear import gated_linear, named_linear
from decoder.layers.spec import Weights
from kernels.activation_names import COMPILED
from kernels.activations import ACTIVATIONS


class MlpMixer:
    """The plain layer: maps `[T, d]` to what is added to the residual stream."""

    def __init__(self, spec: Mlp, options: DecoderOptions, weights: Weights) -> None:
        assert not spec.gated
        self.up, self.down = named_linear(weights, "up_proj", options), named_linear(weights, "down_proj", options)
        self.squared = spec.mlp_hidden_act == "relu2"
        self.act, self.activation = ACTIVATIONS[spec.mlp_hidden_act], COMPILED[spec.mlp_hidden_act]

    def __call__(self, x_TD: Tensor, batch: Batch | None = None) -> Tensor:
        return self.down(self.up.relu_squared(x_TD) if self.squared else self.act(self.up(x_TD)))


class GatedMlpMixer:
    """The gated layer; gate and up are one product."""

    def __init__(self, spec: Mlp, options: DecoderOptions, weights: Weights) -> None:
        assert spec.gated
        names = ("gate_proj", "up_proj")
        bias = None
        if spec.mlp_bias:
            bias = torch.cat([weights[f"{name}.bias"] for name in names])
        gate, up = (weights[f"{name}.weight"] for name in names)
        self.gate_up = gated_linear(gate, up, bias, spec.mlp_hidden_act, options)
        self.down = named_linear(weights, "down_proj", options)

    def __call__(self, x_TD: Tensor, batch: Batch | None = None) -> Tensor:
        return self.down(self.gate_up(x_TD))


def mlp_of(spec: Mlp, options: DecoderOptions, weights: Weights) -> MlpMixer | GatedMlpMixer:
    """Builds the plain or gated layer."""
    return (GatedMlpMixer if spec.gated else MlpMixer)(spec, options, weights)
