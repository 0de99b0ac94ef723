"""The Mamba-2 recurrence over packed sequences, chunk by chunk."""

from kernels.chunk_scan import reference
from kernels.chunk_scan.plan import Chunk, chunk_table, plan_chunks
from kernels.dispatch import dispatched

chunk_scan = dispatched(reference.chunk_scan)

__all__ = ["Chunk", "chunk_scan", "chunk_table", "plan_chunks"]
