"""Which pairs a program of a grouped product computes, in Triton. Letters as in `kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.varlen_attention.kernel import find_segment


@triton.jit
def block_pairs(  # type: ignore[no-untyped-def]
    p_starts,  # [E + 1]: where each expert's pairs begin in the order of pairs by expert
    experts,
    BLOCK_M: tl.constexpr,
):
    """(expert of this program, index of the expert's first pair in the order, number of its pairs, index among these of
    this program's first pair). Blocks are axis 1 of the grid; in a block without pairs, the last result is not below
    the number of pairs."""
    i_block = tl.program_id(1)
    i_expert = find_segment(p_starts, experts, i_block, BLOCK_M)
    begin = tl.load(p_starts + i_expert).to(tl.int32)
    count = tl.load(p_starts + i_expert + 1).to(tl.int32) - begin
    first = (i_block - begin // BLOCK_M - i_expert) * BLOCK_M
    return i_expert, begin, count, first
