"""Mixture of experts: routers and experts."""

from kernels.dispatch import dispatched
from kernels.moe import reference
from kernels.moe.experts import Experts

route = dispatched(reference.route)
route_softmax = dispatched(reference.route_softmax)
run_experts = dispatched(reference.run_experts)

__all__ = ["Experts", "route", "route_softmax", "run_experts"]
