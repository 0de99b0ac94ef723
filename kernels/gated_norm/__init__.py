"""The gated, grouped norm at the end of a Mamba-2 mixer."""

from kernels.dispatch import dispatched
from kernels.gated_norm import reference

gated_norm = dispatched(reference.gated_norm)

__all__ = ["gated_norm"]
