"""The Mamba-2 recurrence over packed sequences, a chunk at a time."""

from kernels.chunk_scan.plan import Chunk, chunk_table, plan_chunks
from kernels.chunk_scan.reference import chunk_scan

__all__ = ["Chunk", "chunk_scan", "chunk_table", "plan_chunks"]
