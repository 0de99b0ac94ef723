"""Positions of tokens, for layers that read them (rotary embeddings)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Positions:
    """Positions of one request whose tokens do not simply count up, as where images have rows and columns."""

    prompt: Sequence[tuple[int, ...]]
    """Of each prompt token, one number for each axis."""
    delta: int
    """A generated token at index n has position n + delta on all axes."""

    def at(self, index: int, axes: int) -> tuple[int, ...]:
        """Of the token at this index of prompt and output together."""
        return self.prompt[index] if index < len(self.prompt) else (index + self.delta,) * axes


def positions_of(positions: Positions | None, start: int, end: int, axes: int) -> list[tuple[int, ...]]:
    """Of the tokens from `start` to `end` of one request; `None` counts up from 0."""
    if positions is None:
        return [(index,) * axes for index in range(start, end)]
    return [positions.at(index, axes) for index in range(start, end)]
