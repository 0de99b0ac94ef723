"""What a device knows of the packed rows of a scan: the tables that the Triton scan and convolution read.

The references take the same facts as Python sequences (`chunks`, `saves`). Here they are one int32 buffer, so that a
step needs one copy to the device, and a captured graph has one address to refresh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 32
"""Tokens of a tile of the convolution. The first tile of a row holds the row or at least W - 1 tokens of it."""


@dataclass(frozen=True)
class ScanTables:
    """Views of `buffer`. Rows beyond the real ones have no saves; tiles beyond the real ones have row -1.

    Chunks end at absolute multiples of `chunk_size` and at saves, as `plan_chunks` cuts them.
    """

    buffer: Tensor
    chunk_size: int
    rows: int
    saves: int

    @property
    def phases_R(self) -> Tensor:
        """Tokens of the row's first chunk that an earlier step has done."""
        return self.buffer[: self.rows]

    @property
    def saves_R1(self) -> Tensor:
        """Row r has the saves `saves_R1[r]:saves_R1[r + 1]`, ordered by where they are."""
        return self.buffer[self.rows : 2 * self.rows + 1]

    @property
    def ends_S(self) -> Tensor:
        """Packed tokens, of this row and those before it, after which the state is kept."""
        return self.buffer[2 * self.rows + 1 : 2 * self.rows + 1 + self.saves]

    @property
    def targets_S(self) -> Tensor:
        """The slots where it is kept."""
        return self.buffer[2 * self.rows + 1 + self.saves : 2 * self.rows + 1 + 2 * self.saves]

    @property
    def tiles_V2(self) -> Tensor:
        """(row, first packed token) of each tile."""
        return self.buffer[2 * self.rows + 1 + 2 * self.saves :].view(-1, 2)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        computed: Sequence[int],
        chunk_size: int,
        saves: Sequence[tuple[int, int, int]] = (),
        *,
        device: torch.device | str = "cpu",
        rows: int | None = None,
        tiles: int | None = None,
        room: int | None = None,
    ) -> ScanTables:
        """Rows of `lengths[r]` new tokens after `computed[r]` old ones; `saves`: (row, end, slot) as `causal_conv1d`
        takes them. `rows`, `tiles` (see `tiles_for`) and `room` (for saves) are fixed sizes to pad to. `ValueError`
        when they do not suffice.
        """
        kept = sorted(saves)
        counts = [0] * len(lengths)
        for row, _, _ in kept:
            counts[row] += 1
        cut: list[int] = []
        begin = 0
        for row, length in enumerate(lengths):
            for first in range(begin, begin + length, TILE):
                cut += (row, first)
            begin += length
        sizes = {"rows": (len(lengths), rows), "tiles": (len(cut) // 2, tiles), "saves": (len(kept), room)}
        for name, (needed, given) in sizes.items():
            if given is not None and needed > given:
                raise ValueError(f"the tables have room for {given} {name}, the step has {needed}")
        spare = (rows or len(lengths)) - len(lengths)
        values = [position % chunk_size for position in computed] + [0] * spare
        total = 0
        for count in (0, *counts, *[0] * spare):
            total += count
            values.append(total)
        padding = [-1] * ((room or len(kept)) - len(kept))
        values += [end for _, end, _ in kept] + padding
        values += [slot for _, _, slot in kept] + padding
        values += cut + [-1] * (2 * (tiles or len(cut) // 2) - len(cut))
        buffer = torch.tensor(values, dtype=torch.int32).to(device)
        return cls(buffer, chunk_size, len(lengths) + spare, len(kept) + len(padding))

    @staticmethod
    def tiles_for(tokens: int, rows: int) -> int:
        """Tiles that so many tokens in so many rows need at most."""
        return tokens // TILE + rows
