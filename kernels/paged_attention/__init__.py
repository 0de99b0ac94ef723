"""Causal attention over keys and values in pages of a shared pool."""

from kernels.dispatch import dispatched
from kernels.paged_attention import reference

decode_attention = dispatched(reference.decode_attention)
decode_attention_after = dispatched(reference.decode_attention_after)
extend_attention = dispatched(reference.extend_attention)
write_kv = dispatched(reference.write_kv)

__all__ = ["decode_attention", "decode_attention_after", "extend_attention", "write_kv"]
