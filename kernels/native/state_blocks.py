"""The size of a recurrent state in compiled code, which keeps the state after the last whole block of
`BLOCK_TOKENS` tokens and the inputs of the tokens since."""

from __future__ import annotations

from typing import NamedTuple

from kernels.native.instruction_sets import bf16_pairs
from kernels.native.structs import BLOCK_TOKENS


class StateShape(NamedTuple):
    """Sizes of one layer's state, named as in Mamba-2."""

    groups: int
    """Groups of heads; for the gated delta rule, key heads."""
    heads: int
    """Heads of all groups together; for the gated delta rule, value heads."""
    head: int
    """Width of a head; for the gated delta rule, of a value head."""
    state: int
    """State size per channel of a head; for the gated delta rule, the width of a key head."""

    def block_bytes(self, dtype_bytes: int, state_bytes: int) -> int:
        """Bytes of the state in a slot, see `state_shape.h`. `dtype_bytes`, `state_bytes`: bytes of a value in the
        compute dtype and in the state dtype. Values of the compute dtype are stored in 4 bytes if the instruction set
        in use does not multiply pairs of bfloat16."""
        number = 2 if dtype_bytes == 2 and bf16_pairs() else 4
        per_cell = 4 // number
        heads, lanes = self.heads // self.groups, _up(self.head, 16)
        columns = _up(self.state, per_cell)
        state = _up(heads * lanes * columns * state_bytes, 64)
        count, sums = 64, 4 * heads * BLOCK_TOKENS
        x = heads * lanes * BLOCK_TOKENS * number
        b = 4 * BLOCK_TOKENS * _up(columns // per_cell, 16)
        return self.groups * (state + count + sums + x + b)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
