"""Constraints on the tokens of a sample: the interface between the decoder and grammars.

A constraint is host state that belongs to one request. The decoder asks it which tokens may follow and tells it which
token was drawn; where the constraint does not restrict the text, its mask is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

FULL = 0xFFFFFFFF
"""A word of a mask that allows all of its tokens."""


class ConstraintError(Exception):
    """The reason why a constraint cannot continue. It ends its own request only."""


class Mask(NamedTuple):
    """Memory for a mask."""

    words: np.ndarray
    """uint32 `[ceil(vocab_size / 32)]`, contiguous: bit `token % 32` of `words[token // 32]` allows the token."""
    address: int
    """Address of `words` for compiled code. Kept because asking numpy for it can take longer than filling a mask."""

    @classmethod
    def over(cls, words: np.ndarray) -> Mask:
        return cls(words, words.ctypes.data)


class Constraint(Protocol):
    """What may follow in one sample, given the tokens accepted so far; a function of these tokens alone. Not
    thread-safe; each sample has its own.

    Any method may raise. This ends the request of this constraint with the error, and no other.
    """

    def copy(self) -> Constraint:
        """An independent constraint in the same state, for another sample."""

    def fill_mask(self, mask: Mask) -> None:
        """Writes which tokens may follow.

        End-of-sequence ids are allowed exactly where the text may end. At least one bit is set, unless the accepted
        tokens have ended the sample.
        """

    def accept(self, token: int) -> None:
        """Appends a token, which must be allowed (asserted)."""

    def rollback(self, count: int) -> None:
        """Removes the last `count` accepted tokens."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of the first of `tokens` are allowed, one after the other, from the current state, which does not
        change."""

    def forced(self) -> list[int]:
        """The tokens that must follow because there is no alternative; may be empty. The state does not change."""
