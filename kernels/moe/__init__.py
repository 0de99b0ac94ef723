"""Mixture of experts: router and experts."""

from kernels.moe.reference import route, run_experts

__all__ = ["route", "run_experts"]
