"""Log-probabilities of a prompt's own tokens, collected during prefill.

The token at position p is scored by the logits of position p - 1. The first token has no score, and neither have rows
of images, which are not tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from decoder.request import PromptScore, PromptScores
from decoder.step import Row
from kernels.sample import logprobs

BLOCK = 64
"""Positions whose logits are in memory at a time."""


class PromptScoring:
    """Scores of the running requests that asked for them."""

    def __init__(self, logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        """`logits`: hidden rows `[T, d]` before the final norm -> `[T, vocab]`."""
        self._logits, self._vocab_size = logits, vocab_size
        self._found: dict[str, PromptScores] = {}

    def add(self, rows: Iterable[Row], hidden_TD: Tensor) -> None:
        """Adds the hidden rows of a step, in the order of `rows`. No work if no request asked for scores. One host sync
        per block of `BLOCK` positions."""
        first = 0
        for row in rows:
            sequence = row.sequence
            wanted = sequence.request.sampling.prompt_logprobs is not None
            unreported = sequence.output_len == len(sequence.request.output_ids)
            if wanted and unreported and row.start < sequence.prompt_len:
                self._add(row, hidden_TD[first : first + row.count])
            first += row.count

    def _add(self, row: Row, hidden_TD: Tensor) -> None:
        request = row.sequence.request
        count = min(request.sampling.prompt_logprobs or 0, self._vocab_size)
        if row.start == 0:
            self._found.pop(request.request_id, None)
        found = self._found.setdefault(request.request_id, PromptScores(count))
        last = min(row.end, row.sequence.prompt_len - 1)
        within = ((max(span.start, row.start), min(span.end, last + 1)) for span in request.spans)
        rows_of_images = {p for start, end in within for p in range(start, end)}
        places = [p for p in range(row.start, last) if p + 1 not in rows_of_images]
        for begin in range(0, len(places), BLOCK):
            part = places[begin : begin + BLOCK]
            index = torch.tensor([p - row.start for p in part], device=hidden_TD.device)
            targets = torch.tensor([request.prompt_ids[p + 1] for p in part], device=hidden_TD.device)
            scores = self._logits(hidden_TD.index_select(0, index)).float()
            found.positions.extend(p + 1 for p in part)
            columns: tuple[array[Any], ...] = (found.tokens, found.logprobs, found.top_tokens, found.top_logprobs)
            for column, values in zip(columns, (targets, *logprobs(scores, targets, count)), strict=True):
                column.frombytes(values.cpu().contiguous().numpy().tobytes())

    def take(self, request_id: str) -> SequenceOf[PromptScore]:
        """Returns and drops the scores of a request, by position."""
        return self._found.pop(request_id, ())
