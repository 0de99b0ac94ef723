"""Hidden states of a prompt, collected during prefill: the last one and the mean of all.

A prompt may be computed in chunks, and preempted in between: sums continue, and restart when the prompt does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.request import Pooled
from decoder.step import Row


@dataclass
class _Sum:
    total: Tensor
    last: Tensor
    count: int


class Pools:
    """The sums of running requests that need them."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        """`norm`: the model's final norm."""
        self._norm = norm
        self._sums: dict[str, _Sum] = {}

    def add(self, rows: Iterable[Row], hidden_TD: Tensor) -> None:
        """Adds the hidden rows of a step, before the final norm, in the order of `rows`. No work and no sync if no
        request needs them. After the first generated token nothing is added, not even rows of the prompt that are
        computed again after a preemption."""
        first = 0
        for row in rows:
            sequence = row.sequence
            unreported = sequence.output_len == len(sequence.request.output_ids)
            if sequence.request.pooled and unreported and row.start < sequence.prompt_len:
                count = min(row.end, sequence.prompt_len) - row.start  # without the output of a resumed request
                self._add(row, self._norm(hidden_TD[first : first + count]))
            first += row.count

    def _add(self, row: Row, x_TD: Tensor) -> None:
        total, last = x_TD.sum(0, dtype=torch.float64), x_TD[-1].float()
        known = self._sums.get(row.sequence.request_id)
        if known is None or row.start == 0:
            assert row.start == 0, "a prompt that is pooled was not computed from its start"
            self._sums[row.sequence.request_id] = _Sum(total, last, len(x_TD))
            return
        assert known.count == row.start, "a prompt that is pooled was computed with a gap"
        known.total += total
        known.last, known.count = last, row.start + len(x_TD)

    def share(self, leader_id: str, follower_id: str) -> None:
        """Gives `follower`, a sample of the same prompt, the sums of `leader`, which has computed it."""
        self._sums[follower_id] = self._sums[leader_id]

    def take(self, request_id: str) -> Pooled | None:
        """Returns and drops the sums of a request. None if it did not ask for them. Waits for the device."""
        known = self._sums.pop(request_id, None)
        return None if known is None else Pooled(known.last.cpu(), (known.total / known.count).float().cpu())

    def drop(self, request_id: str) -> None:
        self._sums.pop(request_id, None)
