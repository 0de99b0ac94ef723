"""Device tables that describe the packed rows of a scan, for the Triton scan and convolution.

The references take the same information as Python sequences (`chunks`, `saves`). Here it is one int32 buffer, so that
a step needs one copy to the device, and a captured graph has one address to update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.chunk_scan.plan import plan_chunks
from kernels.transfer import upload

TILE = 32
"""Tokens of a tile of the convolution. The first tile of a row holds the whole row or at least W - 1 tokens of it."""


@dataclass(frozen=True)
class ScanTables:
    """Views of `buffer`. Padding rows have no chunks; padding tiles have row -1."""

    buffer: Tensor
    chunk_size: int
    rows: int
    entries: int
    saves: int

    @property
    def chunks_R1(self) -> Tensor:
        """Row r has the entries `chunks_R1[r]:chunks_R1[r + 1]` of `chunks_C4`."""
        return self.buffer[: self.rows + 1]

    @property
    def chunks_C4(self) -> Tensor:
        """(row, first packed token, one past the last, slot for the state after the chunk or -1), in row order.

        If a state is saved in several slots, each further slot is an entry without tokens. The padding that follows,
        at least one entry, is (-1, end of the last row, end of the last row, -1).
        """
        return self.buffer[self.rows + 1 : self.rows + 1 + 4 * self.entries].view(-1, 4)

    @property
    def saves_R1(self) -> Tensor:
        """Row r has the entries `saves_R1[r]:saves_R1[r + 1]` of `saves_V2`."""
        begin = self.rows + 1 + 4 * self.entries
        return self.buffer[begin : begin + self.rows + 1]

    @property
    def saves_V2(self) -> Tensor:
        """(packed token after which a window is saved, its slot)."""
        begin = 2 * self.rows + 2 + 4 * self.entries
        return self.buffer[begin : begin + 2 * self.saves].view(-1, 2)

    @property
    def tiles_V2(self) -> Tensor:
        """(row, first packed token) of each tile of the convolution."""
        return self.buffer[2 * self.rows + 2 + 4 * self.entries + 2 * self.saves :].view(-1, 2)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        computed: Sequence[int],
        chunk_size: int,
        saves: Sequence[tuple[int, int, int]] = (),
        *,
        device: torch.device | str = "cpu",
        padded: Mapping[str, int] | None = None,
    ) -> ScanTables:
        """Tables for rows of `lengths[r]` new tokens after `computed[r]` old ones, cut by `plan_chunks`. `saves`:
        (row, end, slot) as for `causal_conv1d`. `padded`: sizes to pad to, from `room`; raises `ValueError` if the step
        needs more."""
        begins = [0, *accumulate(lengths)]
        kept: dict[tuple[int, int], list[int]] = {}
        for row, end, slot in sorted(saves):
            kept.setdefault((row, end), []).append(slot)
        stops: list[list[int]] = [[] for _ in lengths]
        for row, end in kept:
            stops[row].append(end - begins[row] + computed[row])
        table: list[tuple[int, int, int, int]] = []
        counts = [0] * len(lengths)
        for chunk in plan_chunks(lengths, computed, chunk_size, stops):
            targets = kept.get((chunk.row, chunk.last), [-1])
            table.append((chunk.row, chunk.first, chunk.last, targets[0]))
            table += [(chunk.row, chunk.last, chunk.last, slot) for slot in targets[1:]]
            counts[chunk.row] += len(targets)
        cut = [
            (row, first)
            for row, length in enumerate(lengths)
            for first in range(begins[row], begins[row] + length, TILE)
        ]
        needed = {"rows": len(lengths), "entries": len(table) + 1, "saves": len(saves), "tiles": len(cut)}
        sizes = needed | dict(padded or {})
        for name, need in needed.items():
            if need > sizes[name]:
                raise ValueError(f"the tables have room for {sizes[name]} {name}, the step has {need}")
        spare = sizes["rows"] - len(lengths)
        end = begins[-1]
        kept_by = Counter(row for row, _, _ in saves)
        values = [0, *accumulate(counts), *[len(table)] * spare]
        values += _flat(table, sizes["entries"], (-1, end, end, -1))
        values += [0, *accumulate(kept_by[row] for row in range(len(lengths))), *[len(saves)] * spare]
        values += _flat([(stop, slot) for _, stop, slot in sorted(saves)], sizes["saves"], (-1, -1))
        values += _flat(cut, sizes["tiles"], (-1, -1))
        buffer = upload(values, torch.int32, device)
        return cls(buffer, chunk_size, sizes["rows"], sizes["entries"], sizes["saves"])

    @staticmethod
    def length(rows: int, entries: int, saves: int, tiles: int) -> int:
        """Elements of the buffer for tables of these sizes."""
        return 2 * (rows + 1) + 4 * entries + 2 * saves + 2 * tiles

    @staticmethod
    def room(tokens: int, rows: int, saves: int, chunk_size: int) -> dict[str, int]:
        """Sizes that suffice for any step of at most this many tokens, rows and saves."""
        entries = tokens // chunk_size + 2 * rows + saves + 1
        return {"rows": rows, "entries": entries, "saves": saves, "tiles": tokens // TILE + rows}


def _flat(entries: Sequence[tuple[int, ...]], size: int, padding: tuple[int, ...]) -> list[int]:
    return [number for entry in (*entries, *[padding] * (size - len(entries))) for number in entry]
