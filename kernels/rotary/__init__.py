"""Rotary position embedding of queries and keys."""

from kernels.rotary.reference import Rope, rope_table, rotate

__all__ = ["Rope", "rope_table", "rotate"]
