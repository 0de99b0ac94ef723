"""Log-probabilities of a prompt's own tokens, collected during prefill.

The token at position p is scored by the logits of position p - 1. The first token has no score, and neither have rows
of images, which are not tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from decoder.request import PromptScore
from decoder.step import Row
from kernels.sample import logprobs

BLOCK = 64
"""Positions whose logits are in memory at a time."""


class PromptScores:
    """Scores of the running requests that asked for them."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        """`logits`: hidden rows `[T, d]` before the final norm -> `[T, vocab]`."""
        self._logits = logits
        self._found: dict[str, list[PromptScore]] = {}

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
        found = self._found.setdefault(request.request_id, [])
        if row.start == 0:
            found.clear()
        rows_of_images = {p for span in request.spans for p in range(span.start, span.end)}
        last = min(row.end, row.sequence.prompt_len - 1)
        places = [p for p in range(row.start, last) if p + 1 not in rows_of_images]
        count = request.sampling.prompt_logprobs or 0
        for begin in range(0, len(places), BLOCK):
            part = places[begin : begin + BLOCK]
            index = torch.tensor([p - row.start for p in part], device=hidden_TD.device)
            targets = torch.tensor([request.prompt_ids[p + 1] for p in part], device=hidden_TD.device)
            scores = self._logits(hidden_TD.index_select(0, index)).float()
            chosen, ids, values = logprobs(scores, targets, count)
            for p, token, logprob, top, best in zip(
                part, targets.tolist(), chosen.tolist(), ids.tolist(), values.tolist(), strict=True
            ):
                found.append(PromptScore(p + 1, token, logprob, tuple(zip(top, best, strict=True))))

    def take(self, request_id: str) -> tuple[PromptScore, ...]:
        """Returns and drops the scores of a request, by position."""
        return tuple(self._found.pop(request_id, ()))
