"""Attention within each of several packed sequences."""

from kernels.varlen_attention.reference import reads_host, varlen_attention

__all__ = ["reads_host", "varlen_attention"]
