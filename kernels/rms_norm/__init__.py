"""Root-mean-square norm, optionally with the preceding residual addition."""

from kernels.dispatch import dispatched
from kernels.rms_norm import reference

rms_norm = dispatched(reference.rms_norm)
add_rms_norm = dispatched(reference.add_rms_norm)

__all__ = ["add_rms_norm", "rms_norm"]
