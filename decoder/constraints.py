"""Constraints on what a sample may contain: the interface between the decoder and grammars.

A constraint is host state that belongs to one request. The decoder asks it which tokens may follow, tells it which
token was drawn, and never asks why: a free phase is a full mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class ConstraintError(Exception):
    """Why a constraint cannot go on; ends its own request."""


class Constraint(Protocol):
    """What may follow in one sample, given the tokens accepted so far. Not thread-safe, and owned by one sample.

    What it allows is a function of these tokens alone. Any method may raise: that ends the request of this constraint
    with the error, and no other.
    """

    def copy(self) -> Constraint:
        """An independent constraint in the same state, for another sample."""

    def fill_mask(self, words: torch.Tensor) -> None:
        """Writes which tokens may follow: bit `token % 32` of `words[token // 32]`. `words`: int32
        `[ceil(vocab_size / 32)]` on the CPU, contiguous. End-of-sequence ids are allowed exactly where the text may
        end. At least one bit is set, unless accepted tokens have ended the sample.
        """

    def accept(self, token: int) -> None:
        """The token follows; it was allowed (asserted)."""

    def rollback(self, count: int) -> None:
        """Takes the last `count` accepted tokens back."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, one after another, are allowed from here. Leaves the state as it is."""

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as there is no choice; may be empty. Leaves the state as it is."""
