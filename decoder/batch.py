"""The tensors of one step, built from the scheduler's rows.

Tokens are packed row after row. The first `updates` rows have one token each after an existing state and take the
update path; rows to be verified have a token and drafts, which may be rejected; the rows after them are scanned. For
attention, tokens of the first two kinds are single queries. The tensors are shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from decoder.arena import paged
from decoder.config import DecoderConfig, DecoderOptions
from decoder.positions import positions_of
from decoder.sequence import Sequence
from decoder.singles import singles
from decoder.slot_tables import PageTables, SlotStates
from decoder.step import Row, Step
from kernels.chunk_scan import Chunk, plan_chunks
from kernels.dispatch import Implementation, implementation
from kernels.scan_tables import ScanTables
from kernels.slots import SlotRun
from kernels.transfer import upload

CHUNK_LIMIT: dict[Implementation, int] = {"reference": 64, "triton": 128}
"""Longest chunk of the scan: the work per token grows with a chunk's length. On a CPU shorter chunks stay in the cache;
on a GPU longer ones write fewer states."""


@dataclass(frozen=True)
class ScanRows:
    """The R rows after the updates, tokens `[updates:]` of the batch."""

    slots_R: Tensor
    initial_R: Tensor
    """bool: the row continues from the state in its slot."""
    starts_R: Tensor
    """`[R + 1]` int64, relative to the first of these tokens."""
    computed_R: Tensor
    tables_RW: Tensor
    chunks: tuple[Chunk, ...] | Tensor
    """Empty for a model without recurrent layers. This and the following fields are tensors in a graph's batch."""
    state_saves: tuple[tuple[int, int], ...] | Tensor = ()
    """(chunk, slot): the state after that chunk is saved in the slot."""
    window_saves: tuple[tuple[int, int, int], ...] | Tensor = ()
    """(row, end, slot): the conv window after `end` of these tokens is saved in the slot."""
    cut: tuple[list[int], list[int], int] | None = None
    """(number of tokens of each row, number of tokens before them, chunk length); `None` without recurrent layers."""
    static_tables: ScanTables | None = None
    """A graph's own buffers."""

    @cached_property
    def tables(self) -> ScanTables | None:
        """Tensors that replace the tuples above for the kernels of recurrent layers, made once per step; `None` without
        such layers."""
        if self.static_tables is not None or self.cut is None:
            return self.static_tables
        device = self.slots_R.device
        return self.padded_tables(None, device) if implementation(device.type)[0] == "triton" else None

    def padded_tables(self, sizes: Mapping[str, int] | None, device: torch.device) -> ScanTables:
        """`tables` padded to `sizes`."""
        assert self.cut is not None and not isinstance(self.window_saves, Tensor)
        return ScanTables.of(*self.cut, self.window_saves, device=device, padded=sizes)


@dataclass(frozen=True)
class VerifyTensors:
    """The V rows after the updates: a token and drafts, up to T tokens each, of which the first ones will be accepted.
    Padding rows: batch slot and slots -1, accepted 1 (0 if inputs are replayed), length 0."""

    batch_slots_V: Tensor
    slots_VT: Tensor
    """`[V, 1 + K]` slots of each row, or `[V, 1]` if inputs are replayed."""
    accepted_V: Tensor
    """The slot that the row starts from, counted from 1; if inputs are replayed, the number of valid steps of its
    ring."""
    lengths_V: Tensor
    places_VT: Tensor
    """Index of token t of row v among these rows' packed tokens; the row's first if there is none."""
    packed: Tensor
    """Index of each packed token in `[V * T]`."""
    span: int
    """Ring steps that the kernels read; 0 if states are written instead."""
    slot_runs: tuple[SlotRun, ...] | None
    """Slots of the rows' current states; `None` in a graph."""

    def spread(self, x_NX: Tensor) -> Tensor:
        """Packed tokens `[N, X]` -> `[V, T, X]`."""
        rows, tokens = self.places_VT.shape
        return x_NX.index_select(0, self.places_VT.view(-1)).view(rows, tokens, -1)

    def pack(self, x_VTX: Tensor) -> Tensor:
        """`[V, T, X]` -> packed tokens `[N, X]`."""
        return x_VTX.reshape(-1, x_VTX.shape[-1]).index_select(0, self.packed)


class Held(NamedTuple):
    """A row to be verified, on the host."""

    batch_slot: int
    slots: list[int]
    accepted: int
    """See `VerifyTensors`."""
    tokens: int


class VerifyRows:
    """Rows to be verified: on the host (`None` in a graph), and as tensors, which are made when needed."""

    def __init__(self, held: tuple[Held, ...] | None, replayed: bool, make: Callable[[], VerifyTensors]) -> None:
        self.held, self.replayed, self._make = held, replayed, make

    @cached_property
    def tensors(self) -> VerifyTensors:
        return self._make()


@dataclass(frozen=True)
class Batch:
    """One step's inputs."""

    ids_T: Tensor
    splices: tuple[tuple[int, Tensor], ...]
    """(first token, rows): embeddings that replace those of the table."""
    updates: int
    slots_U: Tensor
    known_slots: SequenceOf[int] | None
    """The same slots on the host; `None` in a graph."""
    queries: int
    """Tokens that attend one by one: those of updates and of rows to be verified."""
    lengths_Q: Tensor
    """Keys of each of these, its own included."""
    longest: int
    tables_QW: Tensor
    places_T: Tensor
    """Destination of each token's key and value: page * page_size + offset."""
    verify: VerifyRows | None
    scan: ScanRows | None
    samples: Tensor | None
    """Tokens whose logits are needed; `None` for all, in order."""
    positions_TA: Tensor | None = None
    """Positions of tokens on each axis; `None` for a model whose layers read no positions."""

    @cached_property
    def slot_runs(self) -> tuple[SlotRun, ...] | None:
        """The slots that the host knows, as runs."""
        return None if self.known_slots is None else tuple(SlotRun.of(self.known_slots))


class Unread(NamedTuple):
    """The results of the previous step, on the device: its tokens `[M]` int64, and which of them end their request,
    `[M]` bool (`None`: none can)."""

    tokens_M: Tensor
    ended_M: Tensor | None


class BatchBuilder:
    """Makes a `Batch` of rows; owns the tensors that live longer than a step."""

    def __init__(self, config: DecoderConfig, options: DecoderOptions) -> None:
        self.config, self.options = config, options
        self.tables = PageTables(options) if paged(config, options) else None
        self.states = SlotStates(options)
        self.chunk_size = self.scan_chunk(config, options)
        self._empty = torch.empty(0, dtype=torch.int64, device=options.device)

    @staticmethod
    def scan_chunk(config: DecoderConfig, options: DecoderOptions) -> int:
        """Tokens of a chunk of the scan; unused by a model that never scans."""
        limit = CHUNK_LIMIT[implementation(torch.device(options.device).type)[0]]
        return min(config.scan_chunk or limit, limit)

    def build(
        self,
        rows: SequenceOf[Row],
        checkpoints: Mapping[int, list[tuple[int, int]]],
        *,
        scan_all: bool,
        unread: Unread | None,
    ) -> Batch:
        """Rows in the scheduler's order; the images among their tokens have been read (`read_images`).

        `checkpoints[arrival]`: (position, slot) of states to save; those at a row's end are saved elsewhere.
        `scan_all`: rows of one token are scanned like the others, as in a graph of mixed rows. `unread`: source of ids
        that the host does not know.
        """
        batch = self._general(rows, checkpoints, 0) if scan_all else self._single(rows)
        if batch is None:
            batch = self._general(rows, checkpoints, sum(row.alone for row in rows))
        return batch if unread is None else self._filled(batch, rows, unread)

    def _general(self, rows: SequenceOf[Row], checkpoints: Mapping[int, list[tuple[int, int]]], alone: int) -> Batch:
        """The batch of any rows; those after the first `alone` ones are scanned."""
        updates = sum(1 for row in rows[:alone] if not row.verified)
        ids: list[int] = []
        splices: list[tuple[int, Tensor]] = []
        samples: list[int] = []
        for row in rows:
            splices += [(len(ids) + first, embeddings) for first, embeddings in row.images]
            ids += row.ids
            if row.samples:
                samples += range(len(ids) - 1 - row.drafts, len(ids))
        slots = [row.sequence.slot for row in rows[:updates]]
        lengths = [row.start + 1 + i for row in rows[:alone] for i in range(row.count)]
        queries = len(lengths)
        tables, places = self._pages(rows, alone)
        return Batch(
            ids_T=self._tensor(ids),
            splices=tuple(splices),
            updates=updates,
            slots_U=self._tensor(slots),
            known_slots=slots,
            queries=queries,
            lengths_Q=self._tensor(lengths),
            longest=max(lengths, default=0),
            tables_QW=tables[:queries],
            places_T=places,
            verify=self._verify(rows[updates:alone]) if updates < alone else None,
            scan=self._scan(rows[alone:], tables[queries:], checkpoints) if alone < len(rows) else None,
            samples=None if len(samples) == len(ids) else self._tensor(samples),
            positions_TA=self._positions(rows),
        )

    def _single(self, rows: SequenceOf[Row]) -> Batch | None:
        """The batch of rows of one token each after a state, all of which draw, packed into one tensor: the case of
        nearly all steps. `None` if there are other rows."""
        tables = self.tables
        alone = singles(rows, tables, self.options.page_size, 0)
        if alone is None:
            return None
        columns = [alone.ids, alone.slots, alone.lengths]
        if tables is not None:
            columns += [alone.places, alone.batch_slots]
        ids_T, slots_U, lengths_Q, *paged = upload(columns, torch.int64, self.options.device).unbind()
        return Batch(
            ids_T=ids_T,
            splices=(),
            updates=len(rows),
            slots_U=slots_U,
            known_slots=alone.slots,
            queries=len(rows),
            lengths_Q=lengths_Q,
            longest=max(alone.lengths),
            tables_QW=self._empty if tables is None else tables.table.index_select(0, paged[1]),
            places_T=self._empty if tables is None else paged[0],
            verify=None,
            scan=None,
            samples=None,
            positions_TA=self._positions(rows),
        )

    def _positions(self, rows: SequenceOf[Row]) -> Tensor | None:
        axes = self.config.position_axes
        if not axes:
            return None
        found = [at for row in rows for at in positions_of(row.sequence.request.positions, row.start, row.end, axes)]
        return upload(found, torch.int64, self.options.device)

    def _filled(self, batch: Batch, rows: SequenceOf[Row], unread: Unread) -> Batch:
        """The batch with the ids that only the device knows, each the id of a row of one token. A row whose token ended
        its request becomes padding: slot -1, place -1, no keys."""
        places: list[tuple[int, int, int]] = []
        first = 0
        for index, row in enumerate(rows):
            if row.end > row.sequence.known:
                assert row.count == 1
                places.append((index, first, row.sequence.place))
            first += row.count
        if not places:
            return batch
        rows_N, tokens_N, places_N = upload(list(zip(*places, strict=True)), torch.int64, self.options.device)
        batch.ids_T.index_copy_(0, tokens_N, unread.tokens_M.index_select(0, places_N))
        if unread.ended_M is None:
            return batch
        ended = unread.ended_M.index_select(0, places_N)
        gone_T = torch.zeros_like(batch.ids_T, dtype=torch.bool).index_copy_(0, tokens_N, ended)
        if batch.places_T.numel():
            batch.places_T.masked_fill_(gone_T, -1)
        batch.lengths_Q.masked_fill_(gone_T[: batch.queries], 0)
        batch.slots_U.masked_fill_(gone_T[: batch.updates], -1)
        if batch.scan is not None and batch.queries == 0:
            gone_R = torch.zeros(len(rows), dtype=torch.bool, device=gone_T.device).index_copy_(0, rows_N, ended)
            batch.scan.slots_R.masked_fill_(gone_R, -1)
        return replace(batch, known_slots=None)

    def _tensor(self, values: list[int]) -> Tensor:
        return upload(values, torch.int64, self.options.device) if values else self._empty

    def _pages(self, rows: SequenceOf[Row], alone: int) -> tuple[Tensor, Tensor]:
        """(page table of each token of the first `alone` rows and of each row after them, place of each token)."""
        if self.tables is None:
            return self._empty, self._empty
        size = self.options.page_size
        places: list[int] = []
        for row in rows:
            self.tables.update(row.sequence)
            pages = row.sequence.held.pages
            if row.count == 1:
                places.append(pages[row.start // size] * size + row.start % size)
            else:
                for index in range(row.start // size, -(-row.end // size)):
                    first, at = index * size, pages[index] * size
                    places += range(at + max(row.start - first, 0), at + min(row.end - first, size))
        batch_slots = [row.sequence.held.batch_slot for row in rows[:alone] for _ in range(row.count)]
        batch_slots += [row.sequence.held.batch_slot for row in rows[alone:]]
        return self.tables.table.index_select(0, self._tensor(batch_slots)), self._tensor(places)

    def page_tables(self, sequences: SequenceOf[Sequence]) -> Tensor:
        """`[R, W]` page numbers of sequences in order, -1 beyond what each has."""
        assert self.tables is not None
        for sequence in sequences:
            self.tables.update(sequence)
        return self.tables.table.index_select(0, self._tensor([sequence.held.batch_slot for sequence in sequences]))

    def _verify(self, rows: SequenceOf[Row]) -> VerifyRows:
        replayed, held = self.states.replayed, []
        for row in rows:
            sequence, slots = row.sequence, row.sequence.held.slots
            reserved = f"{row.count} tokens to verify, but {len(slots)} state slots are reserved"
            assert replayed or len(slots) >= row.count, reserved
            accepted = sequence.held.replayed if replayed else sequence.held.accepted
            held.append(Held(sequence.held.batch_slot, slots, accepted, row.count))
        return VerifyRows(tuple(held), replayed, partial(self._verify_tensors, rows))

    def _verify_tensors(self, rows: SequenceOf[Row]) -> VerifyTensors:
        replayed, width = self.states.replayed, max(row.count for row in rows)
        for row in rows:
            self.states.update(row.sequence)
        batch_slots = self._tensor([row.sequence.held.batch_slot for row in rows])
        starts = accumulate((row.count for row in rows), initial=0)
        places = [
            [start + (i if i < row.count else 0) for i in range(width)]
            for start, row in zip(starts, rows, strict=False)
        ]
        return VerifyTensors(
            batch_slots_V=batch_slots,
            slots_VT=self.states.slots.index_select(0, batch_slots),
            accepted_V=self.states.accepted.index_select(0, batch_slots),
            lengths_V=self._tensor([row.count for row in rows]),
            places_VT=upload(places, torch.int64, self.options.device),
            packed=self._tensor([index * width + i for index, row in enumerate(rows) for i in range(row.count)]),
            span=max(row.sequence.held.replayed + row.count for row in rows) if replayed else 0,
            slot_runs=tuple(SlotRun.of([row.sequence.slot for row in rows])),
        )

    def _scan(
        self, rows: SequenceOf[Row], tables_RW: Tensor, checkpoints: Mapping[int, list[tuple[int, int]]]
    ) -> ScanRows:
        counts, computed = [row.count for row in rows], [row.start for row in rows]
        starts = [0, *accumulate(counts)]
        cut, chunks = None, tuple[Chunk, ...]()
        inside: dict[tuple[int, int], int] = {}
        if self.config.slots:
            stops = []
            for index, row in enumerate(rows):
                kept = [each for each in checkpoints.get(row.sequence.arrival, ()) if each[0] < row.end]
                inside |= {(index, position): slot for position, slot in kept}
                stops.append([position for position, _ in kept])
            cut = counts, computed, self.chunk_size
            chunks = plan_chunks(*cut, stops)
        return ScanRows(
            slots_R=self._tensor([row.sequence.slot for row in rows]),
            initial_R=upload([start > 0 for start in computed], torch.bool, self.options.device),
            starts_R=self._tensor(starts),
            computed_R=self._tensor(computed),
            tables_RW=tables_RW,
            chunks=chunks,
            state_saves=tuple(
                (number, inside[chunk.row, chunk.end])
                for number, chunk in enumerate(chunks)
                if (chunk.row, chunk.end) in inside
            ),
            window_saves=tuple(
                (index, starts[index] + position - computed[index], slot) for (index, position), slot in inside.items()
            ),
            cut=cut,
        )


def read_images(step: Step, hidden_size: int) -> None:
    """Reads the rows of images that the step computes from their sources, into `Row.images`. If a source raises an
    error, or its rows do not have the shape that its span of the prompt needs, its request fails and its row is removed
    from the step."""
    for row in list(step.rows):
        sequence = row.sequence
        if sequence.next_span == len(sequence.request.spans):
            continue
        try:
            row.images.extend(_image_rows(row, hidden_size))
        except Exception as error:  # a source's error ends its own request only
            step.rows.remove(row)
            step.failed.append((sequence, error))


def _image_rows(row: Row, hidden_size: int) -> list[tuple[int, Tensor]]:
    """The value of `Row.images`. Raises `ValueError` if the rows of a source do not have the shape that its span of the
    prompt needs."""
    found = []
    for span in row.sequence.request.spans[row.sequence.next_span :]:
        begin, end = max(span.start, row.start), min(span.end, row.end)
        if begin >= end:
            continue
        rows = span.rows()
        length = span.end - span.start
        if rows.shape != (length, hidden_size):
            raise ValueError(
                f"an image's rows must have shape {(length, hidden_size)}, but its source has {tuple(rows.shape)}"
            )
        found.append((begin - row.start, rows[begin - span.start : end - span.start]))
    return found
