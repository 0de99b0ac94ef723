"""Positions of tokens, for layers that use them (rotary embeddings)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Positions:
    """Positions of one request that differ from the tokens' indices, as for images that have rows and columns."""

    prompt: Sequence[tuple[int, ...]]
    """One number per axis for each prompt token."""
    delta: int
    """A generated token at index n has position n + delta on all axes."""

    def at(self, index: int, axes: int) -> tuple[int, ...]:
        """Position of the token at this index of prompt and output together."""
        return self.prompt[index] if index < len(self.prompt) else (index + self.delta,) * axes

    def check(self, tokens: int, last: int, axes: int, limit: int) -> None:
        """Raises `ValueError` unless each of the prompt's `tokens` tokens has a number for each of `axes` axes, and all
        numbers, up to those of the token at index `last`, are at least 0 and below `limit`: they are used as indices.
        """
        if not axes:
            raise ValueError("positions are given, but the model reads none")
        if len(self.prompt) != tokens:
            raise ValueError(f"positions are given for {len(self.prompt)} tokens, but the prompt has {tokens}")
        widths = {len(at) for at in self.prompt}
        if widths - {axes}:
            raise ValueError(f"positions have {min(widths - {axes})} axes, but the model reads {axes}")
        found = [number for at in self.prompt for number in at]
        found += [tokens + self.delta, last + self.delta] if last >= tokens else []
        low, high = min(found, default=0), max(found, default=0)
        if low < 0 or high >= limit:
            raise ValueError(f"positions are from {low} to {high}, but must be between 0 and {limit - 1}")

    def uncounted(self, start: int, end: int) -> list[int]:
        """The positions of the tokens `[start, end)`, token by token; empty if each equals its token's index."""
        axes = len(self.prompt[0]) if self.prompt else 1
        found = positions_of(self, start, end, axes)
        if all(at == (index,) * axes for index, at in enumerate(found, start)):
            return []
        return [number for at in found for number in at]


def positions_before(positions: Positions | None, start: int, end: int, axes: int) -> list[tuple[int, ...]]:
    """Position of the token before each of the tokens `[start, end)`; 0 on all axes for the first token."""
    first = [(0,) * axes] if start == 0 else []
    return first + positions_of(positions, max(start - 1, 0), end - 1, axes)


def positions_of(positions: Positions | None, start: int, end: int, axes: int) -> list[tuple[int, ...]]:
    """Positions of the tokens `[start, end)` of one request; with `positions` `None` the tokens' indices."""
    if positions is None:
        return [(index,) * axes for index in range(start, end)]
    return [positions.at(index, axes) for index in range(start, end)]
