"""Patches to tower rows: projection, positions, prefix tokens."""

from kernels.patch_embed.reference import patch_embed

__all__ = ["patch_embed"]
