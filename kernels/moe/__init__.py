"""Mixture of experts: router and experts."""

from kernels.dispatch import dispatched
from kernels.moe import reference
from kernels.moe.experts import Experts

route = dispatched(reference.route)
run_experts = dispatched(reference.run_experts)

__all__ = ["Experts", "route", "run_experts"]
