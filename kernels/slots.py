"""Runs of rows whose state slots are consecutive, so that one view of the pool covers them; rounding of states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_RUN = 4
"""Largest number of rows processed together: with more, their states would leave the cache between two passes."""


@dataclass(frozen=True)
class SlotRun:
    """Rows `[begin, end)` have the slots `slot`, `slot + 1`, ...; if `slot` is -1, all of these rows are padding."""

    begin: int
    end: int
    slot: int

    @property
    def slots(self) -> slice:
        return slice(self.slot, self.slot + self.end - self.begin)

    @classmethod
    def of(cls, slots: Sequence[int], limit: int = MAX_RUN) -> list[SlotRun]:
        """Cuts rows into runs of at most `limit` rows; `slots`: the slot of each row, -1 for padding."""
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

    Callers round after every token, so that states do not depend on where a chunk, a step or a draft ends.
    """
    if h.dtype != dtype:
        h.copy_(h.to(dtype))
