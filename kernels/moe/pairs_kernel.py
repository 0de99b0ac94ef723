"""Which pairs a program of a grouped product computes, in Triton. Letters as in `kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.varlen_attention.kernel import find_segment


@triton.jit
def block_pairs(  # type: ignore[no-untyped-def]
    p_starts,  # [E + 1]: each expert's first in the order of pairs by expert
    experts,
    BLOCK_M: tl.constexpr,
):
    """The expert of this program, the place of the expert's first pair in the order, the number of its pairs, and the
    first of them that is this program's. Blocks are axis 1 of the grid; some have no pairs: the first is not below the
    number."""
    i_block = tl.program_id(1)
    i_expert = find_segment(p_starts, experts, i_block, BLOCK_M)
    begin = tl.load(p_starts + i_expert).to(tl.int32)
    count = tl.load(p_starts + i_expert + 1).to(tl.int32) - begin
    first = (i_block - begin // BLOCK_M - i_expert) * BLOCK_M
    return i_expert, begin, count, first
