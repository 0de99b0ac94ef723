"""Applies the constraint of a sequence: masks for a step, drafts that the constraint allows, and its errors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from decoder.constraints import FULL, ConstraintError, Mask
from decoder.request import DecoderRequest


class Guide:
    """A copy of a request's constraint that follows the output. When the constraint raises, the exception is kept in
    `error`, which the caller checks with the next token, and from then on every token is allowed."""

    def __init__(self, request: DecoderRequest) -> None:
        assert request.constraint is not None
        params = request.sampling
        self._constraint = request.constraint.copy()
        self._eos, self._ends = request.eos_token_ids, request.eos_token_ids | params.stop_token_ids
        self._min_tokens, self._ignore_eos = params.min_tokens, params.ignore_eos
        self.error: ConstraintError | None = None
        self.usable = 1
        """How many of the positions of the last `fill`, counted from the first, have masks of the constraint; drafts
        after these positions cannot be accepted."""

    def fill(self, masks: SequenceOf[Mask], ahead: SequenceOf[SequenceOf[int]], output: int, last: int) -> None:
        """Writes the masks of consecutive positions.

        `ahead`: for each position, the drafts before it; each list extends the one before. `output`: output tokens
        before the drafts. `last`: valid bits of the last word of a mask.

        After a draft that ends the text or is not allowed, every token is allowed, because no draw there is used. An
        error after a draft is reported when its position is reached.
        """
        self.usable = 0
        if self.error is None:
            taken, failed = 0, None
            try:
                for mask, drafts in zip(masks, ahead, strict=True):
                    for token in self.cut([*drafts[taken:]]) if len(drafts) > taken else ():
                        self._constraint.accept(token)
                        taken += 1
                    if taken < len(drafts):
                        break
                    self._constraint.fill_mask(mask)
                    if last != FULL:
                        mask.words[-1] &= last
                    self._postpone_end(mask.words, output + taken)
                    self.usable += 1
            except Exception as error:
                failed = error
            try:
                if taken:
                    self._constraint.rollback(taken)
            except Exception as error:
                taken, failed = 0, error
            if failed is not None and not taken:
                self._fail(failed)
        for mask in masks[self.usable :]:
            mask.words.fill(FULL)

    def _postpone_end(self, words_W: np.ndarray, output: int) -> None:
        """Forbids the tokens that must not be drawn before `min_tokens` or under `ignore_eos`, unless nothing else is
        allowed. `ConstraintError` if nothing is allowed."""
        early = self._ends if output < self._min_tokens else self._eos if self._ignore_eos else frozenset()
        if early:
            rest = words_W.copy()
            for token in early:
                rest[token // 32] &= FULL ^ (1 << token % 32)
            if rest.any():
                words_W[:] = rest
        if not np.count_nonzero(words_W):  # three times as fast as `any`
            raise ConstraintError(f"no token is allowed after {output} output tokens")

    def cut(self, drafts: list[int]) -> list[int]:
        """The drafts before the first one that is not allowed or that ends the text (drafting an end saves nothing)."""
        end = next((place for place, token in enumerate(drafts) if token in self._ends), len(drafts))
        try:
            return drafts[: self._constraint.valid_prefix(drafts[:end])]
        except Exception:  # the mask that the next token needs finds the same error and reports it
            return []

    def forced(self) -> list[int]:
        """The tokens that the constraint forces next, up to one that ends the text."""
        try:
            return self.cut(self._constraint.forced())
        except Exception:  # as above
            return []

    def accept(self, token: int) -> None:
        """Appends the token to the constraint's state; does nothing after an error of the constraint."""
        if self.error is not None:
            return
        try:
            self._constraint.accept(token)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ConstraintError):
            wrapped = ConstraintError(f"the constraint has failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self.error = error


def valid_bits(vocab_size: int) -> int:
    """The last word of a mask that allows every token: a bit for each token that it covers."""
    return (1 << (vocab_size - 1) % 32 + 1) - 1


class MaskBuffer:
    """The masks of one step. Only rows of constrained sequences have one."""

    def __init__(self, vocab_size: int) -> None:
        self._words, self._last = -(-vocab_size // 32), valid_bits(vocab_size)
        self._words_GW = torch.empty(0, self._words, dtype=torch.int32)
        self._masks: list[Mask] = []
        """The rows of `_words_GW`."""

    def words(self, count: int) -> Tensor:
        """The first masks: int32 `[count, ceil(vocab_size / 32)]` on the CPU."""
        return self._words_GW[:count]

    def fill(
        self, guides: SequenceOf[tuple[Guide | None, int]], ahead: SequenceOf[SequenceOf[int]]
    ) -> list[tuple[int, Mask]]:
        """The rows that have a mask, and their masks, valid until the next call. Empty (and no work) if no row has one.

        `guides`: for each row, its guide (None if unconstrained) and the number of its sequence's output tokens. Rows
        of one sequence are consecutive, each with one more draft in `ahead`.
        """
        rows = [row for row, (guide, _) in enumerate(guides) if guide is not None]
        if len(rows) > len(self._masks):
            self._words_GW = torch.empty(len(rows), self._words, dtype=torch.int32)
            self._masks = [Mask.over(words) for words in self._words_GW.numpy().view(np.uint32)]
        begin = 0
        while begin < len(rows):
            guide, output = guides[rows[begin]]
            end = begin + 1
            while end < len(rows) and guides[rows[end]][0] is guide:
                end += 1
            assert guide is not None
            guide.fill(self._masks[begin:end], [ahead[row] for row in rows[begin:end]], output, self._last)
            begin = end
        return list(zip(rows, self._masks, strict=False))
