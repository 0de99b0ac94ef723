"""Decides whether a different token is explained by rounding: only if its margin was about as small as the difference
of the paths' logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from decoder.sampler import Sampler
from decoder.sampling import Choice
from decoder.sequence import Sequence as Running

TRIES = 200
FACTOR = 10.0
"""A difference is accepted if the margin is below this many times the difference of the two paths' logits."""


def excused(
    name: str, output: Sequence[int], token: int, plain: Callable[[], Any], other: Callable[[], Any]
) -> tuple[bool, float]:
    """Whether `token` could be drawn for request `name` after `output` if the plain path's logits change by `FACTOR`
    times the difference of the two paths there; and that difference. `plain` and `other` run the whole workload in the
    two ways."""
    drawn: set[int] = set()
    (theirs,) = _at(name, output, other, lambda sampler, logits, given: logits[0].clone())
    mine: list[Tensor] = []

    def jitter(original: Any, logits: Tensor, given: tuple[Any, Any]) -> Tensor:
        error = FACTOR * float((logits[0] - theirs).abs().max())
        noise = torch.Generator().manual_seed(0)
        for _ in range(TRIES):
            moved = logits + (2 * torch.rand(logits.shape, generator=noise) - 1) * error
            drawn.add(original(moved, *given)[0].token)
        mine.append(logits[0].clone())
        return logits[0]

    _at(name, output, plain, jitter)
    return token in drawn, float((mine[0] - theirs).abs().max())


def _at(name: str, output: Sequence[int], runs: Callable[[], Any], see: Callable[..., Tensor]) -> list[Tensor]:
    """The first result of `see` for the row in which the token after `output` is drawn."""
    original, found = Sampler.sample, list[Tensor]()

    def sample(self: Sampler, logits: Tensor, sequences: Sequence[Running], ahead: Any = None) -> list[Choice]:
        given = ahead or [[] for _ in sequences]
        for row, (sequence, before) in enumerate(zip(sequences, given, strict=True)):
            known = [*sequence.tokens[sequence.prompt_len :], *before]
            if not found and sequence.request_id == name and known == list(output):
                alone = ([sequence], [before])
                found.append(see(lambda x, s, a: original(self, x, s, a), logits[row : row + 1], alone))
        return original(self, logits, sequences, ahead) if ahead is not None else original(self, logits, sequences)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "sample", sample)
        runs()
    return found
