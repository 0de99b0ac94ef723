"""Products with a gate: of attention's output, of a gated MLP, and of an expert that every token takes."""

from kernels.dispatch import dispatched
from kernels.gates import reference

add_gated = dispatched(reference.add_gated)
sigmoid_gate = dispatched(reference.sigmoid_gate)
swiglu = dispatched(reference.swiglu)

__all__ = ["add_gated", "sigmoid_gate", "swiglu"]
