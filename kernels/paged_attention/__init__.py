"""Causal attention over keys and values in pages of a shared pool."""

from kernels.paged_attention.reference import decode_attention, extend_attention, write_kv

__all__ = ["decode_attention", "extend_attention", "write_kv"]
