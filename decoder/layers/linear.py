"""Builds linear layers in the options' dtype or quantised, and float32 vectors, from checkpoint weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decoder.config import DecoderOptions
from decoder.layers.spec import Weights
from kernels.activation_names import COMPILED
from kernels.activations import ACTIVATIONS
from kernels.gates import swiglu
from kernels.linear import GatedLinear, Linear, LinearParts, Quantised, Stack, alike, concatenate, quantise
from kernels.linear import stack as join_stack
from kernels.weight_forms import kind_and_group


def stored_weight(weight: Tensor | Quantised, options: DecoderOptions) -> Tensor | Quantised:
    """The weight on the options' device, quantised to the form of `options.weights`. If that is None, or the weight is
    quantised with the same kind already, it stays as it is, and a plain weight gets the options' dtype."""
    if options.weights is not None and not _has_kind(weight, options.weights):
        plain = weight.dequantise() if isinstance(weight, Quantised) else weight
        weight = quantise(plain, options.weights)
    return weight.to(options.device) if isinstance(weight, Quantised) else weight.to(options.device, options.dtype)


def stored_stack(stack: Tensor | Quantised | Stack, options: DecoderOptions) -> Tensor | Quantised:
    """Like `stored_weight` for weights `[experts, out, in]`; those of a `Stack`, or to be quantised, one by one."""
    if isinstance(stack, Stack) or (options.weights is not None and not _has_kind(stack, options.weights)):
        return join_stack(Stack(lambda index: stored_weight(stack[index], options), stack.shape))
    return stored_weight(stack, options)


def _has_kind(weight: Tensor | Quantised, form: str) -> bool:
    """Whether the weight is quantised with the kind of `form`. Its groups may have another size: to quantise it again
    would only add errors."""
    return isinstance(weight, Quantised) and weight.kind == kind_and_group(form)[0]


def _placed(bias: Tensor | None, options: DecoderOptions) -> Tensor | None:
    return None if bias is None else bias.to(options.device, options.dtype)


def stored_linear(
    weight: Tensor | Quantised, bias: Tensor | None, options: DecoderOptions, *, owned: bool = False
) -> Linear:
    """A linear layer with its weight as in `stored_weight`.

    `owned`: the weight may be kept instead of copied.
    """
    return Linear(
        stored_weight(weight, options),
        _placed(bias, options),
        owned=owned,
        dtype=options.dtype,
        activations=options.activations,
    )


def fused_linear(
    weights: Sequence[Tensor | Quantised], bias: Tensor | None, options: DecoderOptions, *, kept: int = 0
) -> Linear | LinearParts:
    """One layer of several weights for the same input, concatenated along their outputs: one product for adjacent
    weights that are stored in the same form. `kept`: the last `kept` weights stay as the checkpoint stores them."""
    count = len(weights) - kept
    stored = [stored_weight(weight, options) for weight in weights[:count]]
    stored += [stored_weight(weight, replace(options, weights=None)) for weight in weights[count:]]
    runs: list[list[Tensor | Quantised]] = []
    for weight in stored:
        if runs and alike([runs[-1][-1], weight]):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    joined, placed = [concatenate(run) if len(run) > 1 else run[0] for run in runs], _placed(bias, options)
    biases = [None] * len(joined) if placed is None else placed.split([weight.shape[0] for weight in joined])
    parts = [
        Linear(weight, part, owned=len(run) > 1, dtype=options.dtype, activations=options.activations)
        for run, weight, part in zip(runs, joined, biases, strict=True)
    ]
    return parts[0] if len(parts) == 1 else LinearParts(parts)


def gated_linear(
    gate: Tensor | Quantised, up: Tensor | Quantised, bias: Tensor | None, act: str, options: DecoderOptions
) -> GatedLinear:
    """Like `fused_linear` for gate and up, followed by `act(gate) * up`; `bias` has both biases, concatenated."""
    product = gated_product(act)
    stored, bias = (stored_weight(gate, options), stored_weight(up, options)), _placed(bias, options)
    if alike(stored):
        return GatedLinear(
            concatenate(stored), bias, product, COMPILED[act], dtype=options.dtype, activations=options.activations
        )
    return GatedLinear(fused_linear([gate, up], bias, options), None, product, COMPILED[act])


def gated_product(act: str) -> Callable[[Tensor], Tensor]:
    """A function of rows `[gate | up]` that returns `act(gate) * up`."""
    if act == "silu":
        return swiglu
    function = ACTIVATIONS[act]

    def product(rows_TI: Tensor) -> Tensor:
        gate, up = rows_TI.chunk(2, dim=-1)
        return function(gate) * up

    return product


def named_linear(weights: Weights, name: str, options: DecoderOptions) -> Linear:
    """The linear layer `name` of these weights, with its bias if there is one."""
    return stored_linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"), options)


def float_vector(weights: Weights, name: str, options: DecoderOptions) -> Tensor:
    """A float32 copy on the device; quantised weights are expanded."""
    tensor = weights[name]
    plain = tensor.dequantise() if isinstance(tensor, Quantised) else tensor
    return plain.to(device=options.device, dtype=torch.float32, copy=True)
