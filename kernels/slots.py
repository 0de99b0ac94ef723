"""Runs of rows with consecutive state slots, which one view of the pool covers; rounding of states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RUN = 4
"""Largest number of rows processed together: more would evict their states from the cache between two passes."""


@dataclass(frozen=True)
class SlotRun:
    """Rows `[begin, end)` have slots `slot`, `slot + 1`, ...; `slot` -1: all of them are padding."""

    begin: int
    end: int
    slot: int

    @property
    def slots(self) -> slice:
        return slice(self.slot, self.slot + self.end - self.begin)

    @classmethod
    def of(cls, slots: Sequence[int], limit: int = MAX_RUN) -> list[SlotRun]:
        """Cuts rows into runs of at most `limit`."""
        runs: list[SlotRun] = []
        for row, slot in enumerate(slots):
            if runs:
                last = runs[-1]
                follows = slot == last.slot + row - last.begin if slot >= 0 else last.slot == -1
                if follows and (slot < 0) == (last.slot < 0) and row - last.begin < limit:
                    runs[-1] = cls(last.begin, row + 1, last.slot)
                    continue
            runs.append(cls(row, row + 1, slot))
        return runs


def round_states(h: Tensor, dtype: torch.dtype) -> None:
    """Rounds float32 states in place to what a pool of this dtype stores for them, to nearest, ties to even.

    States are rounded after every token, not where a chunk, a step or a draft ends, so that none of these changes them.
    """
    if h.dtype != dtype:
        h.copy_(h.to(dtype))
