"""Rotary position embedding of queries and keys, optionally after a norm of each head."""

from kernels.dispatch import dispatched
from kernels.rope import Rope
from kernels.rotary import reference
from kernels.rotary.reference import rope_table

norm_rotate = dispatched(reference.norm_rotate)
rotate = dispatched(reference.rotate)

__all__ = ["Rope", "norm_rotate", "rope_table", "rotate"]
