"""Mixture of MLP experts, in a latent space where the model has one, and one expert that every token takes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from decoder.batch import Batch
from decoder.config import DecoderOptions
from decoder.layers.linear import float_vector, named_linear
from decoder.layers.mlp import Mlp, MlpMixer, check_activation, mlp_of
from decoder.layers.spec import Weights, positive, require
from kernels.dispatch import implementation
from kernels.linear import Quantised
from kernels.moe import Experts as StackedExperts
from kernels.moe import route, route_softmax, run_experts


@dataclass(frozen=True)
class Experts:
    """Shape of one mixture, in elements."""

    hidden_size: int
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    moe_shared_expert_intermediate_size: int | None = 7688
    """Of the expert that every token takes; None for none."""
    moe_latent_size: int | None = None
    mlp_hidden_act: str = "relu2"
    gated: bool = False
    mlp_bias: bool = False
    """Biases of the shared expert and of the latent projections."""
    routing: Literal["sigmoid", "softmax"] = "sigmoid"
    """`sigmoid`: of each expert by itself, with a correction of the choice and groups; `softmax`: over the chosen."""
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        check_activation(self.mlp_hidden_act)
        positive(self, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")
        latent = self.moe_latent_size
        require(latent is None or latent >= 1, f"moe_latent_size must be at least 1, not {latent}")
        if self.moe_shared_expert_intermediate_size is not None:
            positive(self, "moe_shared_expert_intermediate_size")
        experts, groups, kept, chosen = self.n_routed_experts, self.n_group, self.topk_group, self.num_experts_per_tok
        require(experts % groups == 0, f"n_routed_experts {experts} is not a multiple of n_group {groups}")
        require(kept <= groups, f"topk_group {kept} is above n_group {groups}")
        available = kept * (experts // groups)
        require(
            chosen <= available, f"num_experts_per_tok {chosen} is above the {available} experts of the kept groups"
        )

    @property
    def expert(self) -> Mlp:
        """Shape of one routed expert."""
        outer = self.moe_latent_size or self.hidden_size
        return Mlp(outer, self.moe_intermediate_size, self.mlp_hidden_act, self.gated)

    @property
    def shared(self) -> Mlp | None:
        width = self.moe_shared_expert_intermediate_size
        return None if width is None else replace(
            self.expert, hidden_size=self.hidden_size, intermediate_size=width, mlp_bias=self.mlp_bias
        )  # fmt: skip

    @property
    def memory(self) -> None:
        return None

    @property
    def activations(self) -> int:
        routed = self.num_experts_per_tok * (self.moe_intermediate_size + (self.moe_latent_size or 0))
        return (3 if self.gated else 2) * (routed + (self.moe_shared_expert_intermediate_size or 0))

    def weights(self) -> dict[str, tuple[int, ...]]:
        experts = self.n_routed_experts
        found: dict[str, tuple[int, ...]] = {"gate.weight": (experts, self.hidden_size)}
        if self.routing == "sigmoid":
            found["gate.e_score_correction_bias"] = (experts,)
        for name, shape in self.expert.weights().items():
            found[f"experts.{name.removesuffix('.weight')}"] = (experts, *shape)
        if self.shared is not None:
            found |= {f"shared_experts.{name}": shape for name, shape in self.shared.weights().items()}
        if self.moe_latent_size is not None:
            found["fc1_latent_proj.weight"] = (self.moe_latent_size, self.hidden_size)
            found["fc2_latent_proj.weight"] = (self.hidden_size, self.moe_latent_size)
            if self.mlp_bias:
                found |= {"fc1_latent_proj.bias": (self.moe_latent_size,), "fc2_latent_proj.bias": (self.hidden_size,)}
        return found

    def optional_weights(self) -> frozenset[str]:
        return frozenset()


def _experts(
    spec: Experts, options: DecoderOptions, weights: Weights
) -> SequenceOf[Callable[[Tensor], Tensor]]:  # fmt: skip
    """The experts as the implementation that will run wants them: each by itself, or stacked. `ValueError` for what the
    kernel does not have.
    """
    names = [name.removesuffix(".weight") for name in spec.expert.weights()]
    stacks = {name: weights[f"experts.{name}"] for name in names}
    device = torch.device(options.device)
    if implementation(device.type)[0] == "reference":
        return [
            mlp_of(spec.expert, options, {f"{name}.weight": stack[e] for name, stack in stacks.items()})
            for e in range(spec.n_routed_experts)
        ]
    if spec.mlp_hidden_act != "relu2" or spec.gated:
        shape = "gated " * spec.gated + spec.mlp_hidden_act
        raise ValueError(f"experts run with plain relu2 alone on {device.type}, and the model has {shape}")
    if options.weights is not None or any(isinstance(stack, Quantised) for stack in stacks.values()):
        raise ValueError(
            f"quantised experts run on a CPU alone, and the device is {device.type}: leave `weights` unset"
        )
    return StackedExperts(*(stacks[name].to(device, options.dtype) for name in ("up_proj", "down_proj")))


class ExpertsMixer:
    """The layer: `[T, d]` to what is added to the residual stream."""

    def __init__(self, spec: Experts, options: DecoderOptions, weights: Weights) -> None:
        self.spec = spec
        self.gate_ED = float_vector(weights, "gate.weight", options)
        self.correction_E = (
            float_vector(weights, "gate.e_score_correction_bias", options) if spec.routing == "sigmoid" else None
        )
        self.experts = _experts(spec, options, weights)
        prefix = "shared_experts."
        shared = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        self.shared = None if spec.shared is None else mlp_of(spec.shared, options, shared)
        latent = spec.moe_latent_size is not None
        self.enter = named_linear(weights, "fc1_latent_proj", options) if latent else None
        self.leave = named_linear(weights, "fc2_latent_proj", options) if latent else None

    @property
    def plain(self) -> bool:
        """Sigmoid routing among squared-ReLU experts and a shared one like them: what compiled code has."""
        return self.correction_E is not None and isinstance(self.shared, MlpMixer) and self.shared.squared

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
            )
        inner = x_TD if self.enter is None else self.enter(x_TD)
        routed = run_experts(inner, experts, weights, self.experts)
        if self.leave is not None:
            routed = self.leave(routed)
        return routed if self.shared is None else routed + self.shared(x_TD)
