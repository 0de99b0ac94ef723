"""Matrix product with a weight laid out for the machine, plain or quantised."""

from kernels.linear.gated import GatedLinear
from kernels.linear.int8_rows import check_int8_products
from kernels.linear.packed import CompactTable, Packed
from kernels.linear.parts import LinearParts
from kernels.linear.quantised import KINDS, AnyWeight, Quantised, alike, concatenate, quantised_bytes, row_part
from kernels.linear.reference import Linear
from kernels.linear.reference import run_quantised as quantised_linear
from kernels.linear.rounding import quantise
from kernels.linear.scaled import check_fp8_products
from kernels.linear.stacks import Stack, stack

__all__ = [
    "GatedLinear",
    "KINDS",
    "AnyWeight",
    "CompactTable",
    "Linear",
    "LinearParts",
    "Packed",
    "Quantised",
    "Stack",
    "alike",
    "check_fp8_products",
    "check_int8_products",
    "concatenate",
    "quantise",
    "quantised_bytes",
    "quantised_linear",
    "row_part",
    "stack",
]
