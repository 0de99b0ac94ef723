"""Where the chunks of a packed prefill begin and end. Pure integers; made once a step and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """`length` tokens of one row; `first` is the index of the first of them among the packed tokens."""

    row: int
    first: int
    length: int
    end: int
    """Tokens of the sequence up to and including this chunk."""


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of all rows, row after row, padded to the longest: `[chunks, width]`."""

    chunks: tuple[Chunk, ...]
    row_chunks: tuple[range, ...]
    """The chunks of each row."""
    index: Tensor | None
    """`[chunks * width]` int64: packed token of each place, or the number of tokens where there is none; `None` when
    every place holds a token and they lie in order."""
    inverse: Tensor | None
    """`[tokens]` int64: place of each packed token; `None` with `index`."""
    width: int
    tokens: int


def plan_chunks(
    lengths: Sequence[int],
    computed: Sequence[int],
    chunk_size: int,
    stops: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
) -> ChunkPlan:
    """Cuts each row's new tokens at absolute multiples of `chunk_size` and at its `stops` (absolute positions).

    `lengths[r]` new tokens follow `computed[r]` old ones. Chunks never cross rows. A row resumed at a multiple of the chunk
    size is cut as it would have been without the pause, so its result is bitwise the same.
    """
    chunks: list[Chunk] = []
    spans: list[range] = []
    first = 0
    for row, (length, start) in enumerate(zip(lengths, computed, strict=True)):
        begin, position, stop = len(chunks), start, start + length
        cuts = sorted({cut for cut in (stops[row] if stops else ()) if start < cut < stop})
        while position < stop:
            end = min(stop, (position // chunk_size + 1) * chunk_size)
            while cuts and cuts[0] <= position:
                cuts.pop(0)
            if cuts:
                end = min(end, cuts[0])
            chunks.append(Chunk(row, first, end - position, end))
            first += end - position
            position = end
        spans.append(range(begin, len(chunks)))
    width = max(chunk.length for chunk in chunks)
    if all(chunk.length == width for chunk in chunks):
        return ChunkPlan(tuple(chunks), tuple(spans), None, None, width, first)
    index = torch.full((len(chunks), width), first, dtype=torch.int64)
    inverse = torch.empty(first, dtype=torch.int64)
    for place, chunk in enumerate(chunks):
        tokens = torch.arange(chunk.first, chunk.first + chunk.length)
        index[place, : chunk.length] = tokens
        inverse[tokens] = torch.arange(place * width, place * width + chunk.length)
    return ChunkPlan(tuple(chunks), tuple(spans), index.view(-1).to(device), inverse.to(device), width, first)
