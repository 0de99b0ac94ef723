"""Boundaries of the chunks of a packed prefill. Computed on the host once per step and shared by all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """The packed tokens `[first, last)`, all of one row."""

    row: int
    first: int
    last: int
    end: int
    """Number of tokens of the sequence up to the end of this chunk."""
    opens: bool
    """True for the first chunk of its row."""


def chunk_table(chunks: Iterable[Chunk]) -> list[tuple[int, int, int, int]]:
    """(row, first, last, opens) of each chunk: the form for static buffers, where -1 as row is padding."""
    return [(chunk.row, chunk.first, chunk.last, int(chunk.opens)) for chunk in chunks]


def listed_chunks(table_C4: Tensor) -> tuple[Chunk, ...]:
    """The chunks in a buffer `[C, 4]` of `chunk_table`, without padding. Reads the buffer on the host (a sync on a
    GPU); `end`, which no kernel needs, is 0."""
    return tuple(Chunk(row, first, last, 0, bool(opens)) for row, first, last, opens in table_C4.tolist() if row >= 0)


def plan_chunks(
    lengths: Sequence[int],
    computed: Sequence[int],
    chunk_size: int,
    stops: Sequence[Sequence[int]] | None = None,
) -> tuple[Chunk, ...]:
    """Cuts each row's new tokens at absolute multiples of `chunk_size` and at its `stops` (absolute positions).

    `lengths[r]` new tokens follow `computed[r]` old ones. Chunks never span rows and are in row order. A row that is
    resumed at a multiple of the chunk size is cut as without the interruption, so its result is bitwise equal.
    """
    chunks: list[Chunk] = []
    first = 0
    for row, (length, start) in enumerate(zip(lengths, computed, strict=True)):
        position, stop = start, start + length
        cuts = sorted({cut for cut in (stops[row] if stops else ()) if start < cut < stop})
        while position < stop:
            end = min(stop, (position // chunk_size + 1) * chunk_size)
            if cuts and cuts[0] <= end:
                end = cuts.pop(0)
            chunks.append(Chunk(row, first, first + end - position, end, position == start))
            first += end - position
            position = end
    return tuple(chunks)
