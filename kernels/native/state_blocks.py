"""The size of a recurrent state in compiled code: the state before an unfinished block of tokens, and these tokens."""

from __future__ import annotations

from typing import NamedTuple

from kernels.native.instruction_sets import bf16_pairs
from kernels.native.structs import GRID


class StateShape(NamedTuple):
    """Sizes of one layer's state, named as in Mamba-2."""

    groups: int
    """Of the gated delta rule: key heads."""
    heads: int
    """Of all groups. Of the gated delta rule: value heads."""
    head: int
    """Of the gated delta rule: the width of a value head."""
    state: int
    """Of the gated delta rule: the width of a key head."""

    def block_bytes(self, dtype_bytes: int, state_bytes: int) -> int:
        """Bytes in a slot, for a compute dtype and a state dtype of so many bytes per number; `state_shape.h` says of
        what. Numbers of the compute dtype take 4 bytes where the instruction set in use has no products of pairs of
        bfloat16."""
        number = 2 if dtype_bytes == 2 and bf16_pairs() else 4
        per_cell = 4 // number
        heads, lanes = self.heads // self.groups, _up(self.head, 16)
        columns = _up(self.state, per_cell)
        state = _up(heads * lanes * columns * state_bytes, 64)
        pending = 4 * (GRID + heads * GRID) + heads * lanes * GRID * number + 4 * GRID * _up(columns // per_cell, 16)
        return self.groups * (state + pending)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to
