"""Matrix product with a weight laid out for the machine, plain or quantised."""

from kernels.linear.gated import GatedLinear
from kernels.linear.packed import Packed
from kernels.linear.quantised import Quantised, concatenate, quantise, quantised_bytes, row_part, stack
from kernels.linear.reference import Linear

__all__ = [
    "GatedLinear",
    "Linear",
    "Packed",
    "Quantised",
    "concatenate",
    "quantise",
    "quantised_bytes",
    "row_part",
    "stack",
]
