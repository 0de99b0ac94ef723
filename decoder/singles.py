"""Steps of rows of one token each after a state, passed from the host to compiled code without making tensors.

A step reads all weights through the caches, and each torch call after that takes several times as long as in a loop of
torch calls. So such steps, which are most steps, are passed as a few lists that are copied to fixed memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder.arena import paged
from decoder.config import DecoderConfig, DecoderOptions
from decoder.slot_tables import PageTables
from decoder.step import Row
from kernels.native.structs import Step


@dataclass(frozen=True)
class Singles:
    """The rows, in order."""

    ids: list[int]
    slots: list[int]
    lengths: list[int]
    """Keys that each token attends to, its own included."""
    batch_slots: list[int]
    places: list[int]
    """Destination of each token's key and value; empty in a model without pages."""
    positions: list[int]
    """Positions of each token on each axis; empty in a model that reads no positions."""
    greedy: bool
    """Whether the largest logit is taken in every row, and no other output is requested."""


def singles(rows: SequenceOf[Row], tables: PageTables | None, page_size: int, axes: int) -> Singles | None:
    """The rows as such a step; `None` if a row is of another kind, or does not draw. `axes`: number of axes of the
    positions that the model reads."""
    if rows and rows[-1].count != 1:  # prompts come last
        return None
    ids, slots, lengths, batch_slots, places, positions = (list[int]() for _ in range(6))
    greedy = True
    for row in rows:
        sequence, start = row.sequence, row.start
        held = sequence.held
        if row.count != 1 or start == 0 or not row.samples or held.replayed or row.images:
            return None
        ids.append(sequence.tokens[start])
        slots.append(sequence.slot)
        lengths.append(start + 1)
        if axes:
            given = sequence.request.positions
            positions += (start,) * axes if given is None else given.at(start, axes)
        greedy = greedy and sequence.plain
        if tables is not None:
            tables.update(sequence)
            batch_slots.append(held.batch_slot)
            places.append(held.pages[start // page_size] * page_size + start % page_size)
    return Singles(ids, slots, lengths, batch_slots, places, positions, greedy) if ids else None


class SinglesRoom:
    """Memory of such steps, and the `Step` struct that points to it."""

    def __init__(self, options: DecoderOptions, config: DecoderConfig, x_TD: Tensor) -> None:
        """`x_TD`: the residual stream."""
        max_seqs, page_size, axes = options.max_seqs, options.page_size, config.position_axes
        pages = -(-options.max_len // page_size) if paged(config, options) else 0
        self._columns = [(ctypes.c_int64 * max_seqs)() for _ in range(5)]
        self._ids, self._slots, self._lengths, self._places, self._largest = self._columns
        self._pages, self._page_size = pages, page_size
        self._tables = (ctypes.c_int64 * (max_seqs * pages))()
        self._positions = (ctypes.c_int64 * (max_seqs * axes))()
        self._starts = (ctypes.c_int64 * (max_seqs + 1))(*range(max_seqs + 1))
        self._initial = (ctypes.c_int64 * max_seqs)(*[1] * max_seqs)
        self._x, self._logits = x_TD, torch.empty(max_seqs, config.vocab_size)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}
        address = ctypes.addressof
        self.step = Step(
            starts=address(self._starts), slots=address(self._slots), initial=address(self._initial),
            lengths=address(self._lengths), tables=address(self._tables), places=address(self._places),
            table_stride=pages, logits=self._logits.data_ptr(), ids=address(self._ids),
            positions=address(self._positions) if axes else None, axes=axes,
        )  # fmt: skip

    def fill(self, rows: Singles, table_SW: Tensor | None) -> None:
        """Copies the rows to the memory that `step` points to. `table_SW`: page numbers of all batch slots."""
        count = len(rows.ids)
        self.step.tokens = self.step.rows = count
        self.step.largest = ctypes.addressof(self._largest) if rows.greedy else None
        for column, values in zip(self._columns, (rows.ids, rows.slots, rows.lengths, rows.places), strict=False):
            column[: len(values)] = values  # type: ignore[assignment]
        self._positions[: len(rows.positions)] = rows.positions  # type: ignore[assignment]
        if table_SW is None:
            return
        source, target, size = table_SW.data_ptr(), ctypes.addressof(self._tables), 8 * self._pages
        for index, (batch_slot, length) in enumerate(zip(rows.batch_slots, rows.lengths, strict=True)):
            used = -(-length // self._page_size)
            ctypes.memmove(target + index * size, source + batch_slot * size, 8 * used)

    def results(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows before the final norm and logits of a step of `count` rows: the same tensors each time."""
        if count not in self._views:
            self._views[count] = self._x[:count], self._logits[:count]
        return self._views[count]

    def logits(self, count: int) -> Tensor:
        """Memory for the logits `[count, vocab]` float32 of another step: that of `results`, or new memory if there are
        more rows than fit."""
        return (
            self.results(count)[1]
            if count <= len(self._logits)
            else self._logits.new_empty(count, self._logits.shape[1])
        )

    def largest_address(self, count: int) -> int | None:
        """Where a step of `count` rows stores the ids of their largest logits; None for more rows than fit."""
        return ctypes.addressof(self._largest) if count <= len(self._largest) else None

    def largest(self, count: int) -> list[int]:
        """The ids that the last step, of `count` rows, stored at `largest_address`."""
        return self._largest[:count]
