"""Converts patches to tower rows: projection, positions, prefix tokens."""

from kernels.dispatch import dispatched
from kernels.patch_embed import reference

patch_embed = dispatched(reference.patch_embed)

__all__ = ["patch_embed"]
