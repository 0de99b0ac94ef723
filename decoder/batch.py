"""The tensors of one step, built from the scheduler's rows.

Tokens are packed row after row. The first `updates` rows bring one token each on top of an existing state and take
the update path; the rows after them are scanned. What a layer needs is here once for all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.config import DecoderConfig, DecoderOptions
from decoder.request import Sequence
from decoder.scheduler import Row
from kernels.chunk_scan import Chunk, plan_chunks
from kernels.slots import SlotRun

CHUNK_LIMIT = 64
"""Longest chunk of the scan: the work inside a chunk grows with its length, and on a CPU shorter ones stay in the
cache.
"""


@dataclass(frozen=True)
class ScanRows:
    """The R rows after the updates, tokens `[updates:]` of the batch."""

    slots_R: Tensor
    initial_R: Tensor
    """bool: the row continues the state in its slot."""
    starts_R: Tensor
    """`[R + 1]` int64, relative to the first of these tokens."""
    computed_R: Tensor
    tables_RW: Tensor
    chunks: tuple[Chunk, ...] | Tensor
    """Empty for a model without Mamba layers. This and what follows are tensors in a graph's batch."""
    state_saves: tuple[tuple[int, int], ...] | Tensor = ()
    """(chunk, slot): the state after that chunk is kept there."""
    window_saves: tuple[tuple[int, int, int], ...] | Tensor = ()
    """(row, end, slot): the conv window after that many of these tokens is kept there."""


@dataclass(frozen=True)
class Batch:
    """One step's inputs."""

    ids_T: Tensor
    splices: tuple[tuple[int, Tensor], ...]
    """(first token, rows): embeddings that replace those of the table."""
    updates: int
    slots_U: Tensor
    slot_runs: tuple[SlotRun, ...] | None
    """The same slots as runs: what the host knows of them; `None` in a graph, where it knows nothing."""
    lengths_U: Tensor
    """Keys of each update row, its own included."""
    longest: int
    tables_UW: Tensor
    places_T: Tensor
    """Where each token's key and value go: page * page_size + offset."""
    scan: ScanRows | None
    samples: Tensor | None
    """Tokens whose logits are wanted; `None` when all are, in order."""


class PageTables:
    """Page numbers of every seat `[max_seqs, width]` int32, on the device; a row is brought up to date before it is
    used.
    """

    def __init__(self, options: DecoderOptions) -> None:
        width = -(-options.max_len // options.page_size)
        self.table = torch.full((options.max_seqs, width), -1, dtype=torch.int64, device=options.device)
        self._written: list[tuple[int, int]] = [(-1, 0)] * options.max_seqs

    def update(self, sequence: Sequence) -> None:
        """Writes the pages that the seat's row lacks."""
        owner, count = self._written[sequence.seat]
        stamp = sequence.admission
        if owner != stamp:
            self.table[sequence.seat].fill_(-1)
            count = 0
        pages = sequence.pages[count:]
        if pages:
            self.table[sequence.seat, count : count + len(pages)] = torch.tensor(pages, dtype=torch.int64)
        if pages or owner != stamp:
            self._written[sequence.seat] = (stamp, len(sequence.pages))


class BatchBuilder:
    """Makes a `Batch` of rows; holds what outlives a step."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions) -> None:
        self.config, self.options = config, options
        self.tables = PageTables(options) if config.attention_layers else None
        self.chunk_size = self.scan_chunk(config)
        self._empty = torch.empty(0, dtype=torch.int64, device=options.device)

    @staticmethod
    def scan_chunk(config: DecoderConfig) -> int:
        """Tokens of a chunk of the scan."""
        return min(config.chunk_size, CHUNK_LIMIT)

    def build(
        self,
        rows: SequenceOf[Row],
        images: Mapping[str, list[tuple[int, Tensor]]],
        checkpoints: Mapping[int, list[tuple[int, int]]] | None = None,
        *,
        scan_all: bool = False,
    ) -> Batch:
        """Rows in the scheduler's order. `images[request_id]`: what `image_rows` gave for the row.

        `checkpoints[arrival]`: (position, slot) of states to keep; those at a row's very end are not this one's work.
        `scan_all`: rows of one token are scanned like the others, as in a graph of mixed rows.
        """
        updates = 0 if scan_all else sum(1 for row in rows if row.count == 1 and row.start > 0)
        ids: list[int] = []
        splices: list[tuple[int, Tensor]] = []
        samples: list[int] = []
        for row in rows:
            found = images.get(row.sequence.request_id, ())
            splices += [(len(ids) + first, embeddings) for first, embeddings in found]
            ids += row.sequence.tokens[row.start : row.end]
            if row.samples:
                samples.append(len(ids) - 1)
        slots = [row.sequence.slot for row in rows[:updates]]
        tables, places = self._pages(rows)
        return Batch(
            ids_T=self._tensor(ids),
            splices=tuple(splices),
            updates=updates,
            slots_U=self._tensor(slots),
            slot_runs=tuple(SlotRun.of(slots)),
            lengths_U=self._tensor([row.end for row in rows[:updates]]),
            longest=max((row.end for row in rows[:updates]), default=0),
            tables_UW=tables[:updates],
            places_T=places,
            scan=self._scan(rows[updates:], tables[updates:], checkpoints or {}) if updates < len(rows) else None,
            samples=None if len(samples) == len(ids) else self._tensor(samples),
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.options.device) if values else self._empty

    def _pages(self, rows: SequenceOf[Row]) -> tuple[Tensor, Tensor]:
        """Page tables of the rows, and the place of each token."""
        if self.tables is None:
            return self._empty, self._empty
        size = self.options.page_size
        places: list[int] = []
        for row in rows:
            self.tables.update(row.sequence)
            pages = row.sequence.pages
            if row.count == 1:
                places.append(pages[row.start // size] * size + row.start % size)
            else:
                places += [pages[p // size] * size + p % size for p in range(row.start, row.end)]
        seats = self._tensor([row.sequence.seat for row in rows])
        return self.tables.table.index_select(0, seats), self._tensor(places)

    def _scan(
        self, rows: SequenceOf[Row], tables_RW: Tensor, checkpoints: Mapping[int, list[tuple[int, int]]]
    ) -> ScanRows:
        starts, computed = [0], [row.start for row in rows]
        for row in rows:
            starts.append(starts[-1] + row.count)
        chunks: tuple[Chunk, ...] = ()
        inside: dict[tuple[int, int], int] = {}
        if self.config.mamba_layers:
            lengths = [row.count for row in rows]
            for index, row in enumerate(rows):
                kept = checkpoints.get(row.sequence.arrival, ())
                inside |= {(index, position): slot for position, slot in kept if position < row.end}
            stops = [[position for owner, position in inside if owner == index] for index in range(len(rows))]
            chunks = plan_chunks(lengths, computed, self.chunk_size, stops if inside else None)
        return ScanRows(
            slots_R=self._tensor([row.sequence.slot for row in rows]),
            initial_R=torch.tensor([start > 0 for start in computed], device=self.options.device),
            starts_R=self._tensor(starts),
            computed_R=self._tensor(computed),
            tables_RW=tables_RW,
            chunks=chunks,
            state_saves=tuple(
                (number, inside[chunk.row, chunk.end])
                for number, chunk in enumerate(chunks if inside else ())
                if (chunk.row, chunk.end) in inside
            ),
            window_saves=tuple(
                (index, starts[index] + position - computed[index], slot) for (index, position), slot in inside.items()
            ),
        )


def image_rows(row: Row, hidden_size: int) -> list[tuple[int, Tensor]]:
    """Embeddings that fall into this row's tokens, as (token of the row, `[n, hidden]`). Reads the sources.

    `ValueError` when a source has not the rows that its span in the prompt asks for.
    """
    found = []
    for span in row.sequence.request.spans[row.sequence.next_span :]:
        begin, end = max(span.start, row.start), min(span.end, row.end)
        if begin >= end:
            continue
        rows = span.source.rows()
        if rows.shape != (span.length, hidden_size):
            raise ValueError(
                f"an image of {span.length} tokens of width {hidden_size} came with rows of shape {tuple(rows.shape)}"
            )
        found.append((begin - row.start, rows[begin - span.start : end - span.start]))
    return found
