"""A computation that can be interrupted between its pieces: a generator that yields there and returns the result."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Pieces = Generator[None, None, T]


def finish(pieces: Pieces[T]) -> T:
    """Runs a generator to its end and returns the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: T = end.value
            return result
