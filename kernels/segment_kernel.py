"""Finds the segment of a program in Triton, for grids whose size depends on the number of items alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_segment(p_starts, count, i_block, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last of `count` segments whose first block is `i_block` or an earlier one; p_starts: `[count]`, first item of
    each segment. varlen_attention/README.md explains why `items // BLOCK + count` blocks always suffice."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(p_starts + middle) // BLOCK + middle <= i_block:
            low = middle + 1
        else:
            high = middle
    return low - 1
