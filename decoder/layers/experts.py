"""Mixture of MLP experts, optionally in a latent space, with an optional shared expert that every token passes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from decoder.batch import Batch
from decoder.config import DecoderOptions
from decoder.layers.descriptions import Experts
from decoder.layers.linear import float_vector, named_linear, stored_stack
from decoder.layers.mlp import mlp_of
from decoder.layers.spec import Weights, weights_below
from kernels.dispatch import implementation
from kernels.gates import add_gated
from kernels.moe import Experts as StackedExperts
from kernels.moe import route, route_softmax, run_experts


def _experts(spec: Experts, options: DecoderOptions, weights: Weights) -> SequenceOf[Callable[[Tensor], Tensor]]:
    """The experts in the form that the selected implementation takes: one by one, or stacked. Raises `ValueError` for
    stacked weights that the kernel does not support."""
    names = [name.removesuffix(".weight") for name in spec.expert.weights()]
    stacks = {name: weights[f"experts.{name}"] for name in names}
    device = torch.device(options.device)
    if implementation(device.type)[0] == "reference":
        return [
            mlp_of(spec.expert, options, {f"{name}.weight": stack[e] for name, stack in stacks.items()})
            for e in range(spec.n_routed_experts)
        ]
    stacked = {name: stored_stack(stack, options) for name, stack in stacks.items()}
    return StackedExperts(stacked["up_proj"], stacked["down_proj"], stacked.get("gate_proj"), spec.mlp_hidden_act)


class ExpertsMixer:
    """The layer: maps `[T, d]` to what is added to the residual stream."""

    def __init__(self, spec: Experts, options: DecoderOptions, weights: Weights) -> None:
        self.spec = spec
        self.gate_ED = float_vector(weights, "gate.weight", options)
        self.correction_E = None
        """`[E]` float32, zeros without a correction bias; None for a softmax."""
        if spec.routing == "sigmoid":
            name, zeros = "gate.e_score_correction_bias", self.gate_ED.new_zeros(spec.n_routed_experts)
            self.correction_E = float_vector(weights, name, options) if spec.correction else zeros
        self.experts = _experts(spec, options, weights)
        shared = weights_below(weights, "shared_experts.")
        self.shared = None if spec.shared is None else mlp_of(spec.shared, options, shared)
        self.shared_gate_1D = float_vector(weights, "shared_expert_gate.weight", options) if spec.shared_gate else None
        latent = spec.moe_latent_size is not None
        self.enter = named_linear(weights, "fc1_latent_proj", options) if latent else None
        self.leave = named_linear(weights, "fc2_latent_proj", options) if latent else None

    def __call__(self, x_TD: Tensor, batch: Batch | None = None) -> Tensor:
        spec = self.spec
        if self.correction_E is None:
            experts, weights = route_softmax(x_TD, self.gate_ED, spec.num_experts_per_tok)
        else:
            experts, weights = route(
                x_TD,
                self.gate_ED,
                self.correction_E,
                spec.num_experts_per_tok,
                spec.n_group,
                spec.topk_group,
                spec.norm_topk_prob,
                spec.routed_scaling_factor,
                spec.weight_epsilon,
            )
        inner = x_TD if self.enter is None else self.enter(x_TD)
        routed = run_experts(inner, experts, weights, self.experts)
        if self.leave is not None:
            routed = self.leave(routed)
        if self.shared is None:
            return routed
        shared = self.shared(x_TD)
        if self.shared_gate_1D is None:
            return routed + shared
        return add_gated(routed, shared, x_TD, self.shared_gate_1D)
