"""Rotary position embedding of queries and keys."""

from kernels.rope import Rope
from kernels.rotary.reference import rope_table, rotate

__all__ = ["Rope", "rope_table", "rotate"]
