"""Matrix product with a weight laid out for the machine."""

from kernels.linear.reference import Linear

__all__ = ["Linear"]
