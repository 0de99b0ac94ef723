"""A tower's positions per patch grid, made once and kept while there is room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from encoder.item import Grid


class PositionCache:
    """Least recently used grids go first once `max_bytes` are held; one grid larger than that is not kept."""

    def __init__(self, make: Callable[[Grid], Tensor], max_bytes: int) -> None:
        """`make`: a grid's positions, in new memory (`Tower.positions`)."""
        self._make = make
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Grid, Tensor] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, grid: Grid) -> Tensor:
        """`[gh * gw, position_width]`; shared memory, not to be written."""
        found = self._entries.get(grid)
        if found is not None:
            self.hits += 1
            self._entries.move_to_end(grid)
            return found
        self.misses += 1
        made = self._make(grid)
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
