"""Gated products: of attention's output, of a gated MLP, and of a shared expert."""

from kernels.dispatch import dispatched
from kernels.gates import reference

add_gated = dispatched(reference.add_gated)
sigmoid_gate = dispatched(reference.sigmoid_gate)
swiglu = dispatched(reference.swiglu)

__all__ = ["add_gated", "sigmoid_gate", "swiglu"]
