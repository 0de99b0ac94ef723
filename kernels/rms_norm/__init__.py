"""Root-mean-square norm."""

from kernels.rms_norm.reference import rms_norm

__all__ = ["rms_norm"]
