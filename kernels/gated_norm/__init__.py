"""The gated, grouped norm at the end of a Mamba-2 mixer."""

from kernels.gated_norm.reference import gated_norm

__all__ = ["gated_norm"]
