"""Which pairs a program of a grouped product computes, in Triton. Letters as in `kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.segment_kernel import find_segment


@triton.jit
def block_pairs(  # type: ignore[no-untyped-def]
    p_starts,  # [E + 1]: where each expert's pairs begin in the order of pairs by expert
    experts,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,  # experts, rounded up to a power of 2; 0: see below
):
    """(expert of this program, index of the expert's first pair in the order, number of its pairs, index among these of
    this program's first pair). Blocks are axis 1 of the grid; in a block without pairs, the last result is not below
    the number of pairs."""
    i_block = tl.program_id(1)
    if BLOCK_E == 0:
        i_expert = find_segment(p_starts, experts, i_block, BLOCK_M)
    else:
        # The same expert with one load: a binary search waits for each of its loads, and a program computes only one
        # tile. Kernels with quantised weights search, because their registers would spill.
        o_e = tl.arange(0, BLOCK_E)
        m_e = o_e < experts
        b_first = tl.load(p_starts + o_e, mask=m_e, other=0).to(tl.int32) // BLOCK_M + o_e
        i_expert = tl.sum((m_e & (b_first <= i_block)).to(tl.int32), 0) - 1
    begin = tl.load(p_starts + i_expert).to(tl.int32)
    count = tl.load(p_starts + i_expert + 1).to(tl.int32) - begin
    first = (i_block - begin // BLOCK_M - i_expert) * BLOCK_M
    return i_expert, begin, count, first
