"""Position embeddings per patch grid, interpolated once and kept while there is room."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor
from torch.nn import functional as F


class PositionCache:
    """Least recently used grids go first once `max_bytes` are held; one grid larger than that is not kept."""

    def __init__(self, table_1ND: Tensor, side: int, max_bytes: int) -> None:
        """`table_1ND`: `[1, side * side, D]` in the tower's dtype, on its device."""
        features = table_1ND.shape[-1]
        self._dtype = table_1ND.dtype
        # float32, and a place's features side by side: the interpolation then reads four rows for each place. With its
        # features a plane apart, each number is a cache miss of its own, and a grid takes a hundred times as long.
        self._table_1DSS = table_1ND.float().view(1, side, side, features).permute(0, 3, 1, 2)
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[int, int], Tensor] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, grid: tuple[int, int]) -> Tensor:
        """`[gh * gw, D]` in the tower's dtype, row-major; shared memory, not to be written."""
        found = self._entries.get(grid)
        if found is not None:
            self.hits += 1
            self._entries.move_to_end(grid)
            return found
        self.misses += 1
        made = interpolate_positions(self._table_1DSS, grid, self._dtype)
        size = made.numel() * made.element_size()
        if size <= self._max_bytes:
            while self.bytes + size > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.bytes -= oldest.numel() * oldest.element_size()
            self._entries[grid] = made
            self.bytes += size
        return made

    def check_integrity(self) -> None:
        """Asserts that the bytes counted are the bytes held and within the bound."""
        held = sum(entry.numel() * entry.element_size() for entry in self._entries.values())
        assert held == self.bytes <= self._max_bytes, (held, self.bytes, self._max_bytes)


def interpolate_positions(table_1DSS: Tensor, grid: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`[gh * gw, D]`: the square table resized bilinearly to the grid's longer side and cropped (RADIO's rule)."""
    rows, columns = grid
    side = max(grid)
    square = F.interpolate(table_1DSS, size=(side, side), mode="bilinear", align_corners=False)
    return square[0].permute(1, 2, 0)[:rows, :columns].to(dtype).reshape(rows * columns, -1)
