"""Caches the position embeddings and rotations that a tower computes for each patch grid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from encoder.item import Grid


class PositionCache:
    """An LRU cache by grid of at most `max_bytes`; an entry larger than that is not cached."""

    def __init__(
        self, make: Callable[[Grid], Tensor], max_bytes: int, rotations: Callable[[Grid], Tensor] | None = None
    ) -> None:
        """`make`: `Tower.positions`, which returns new memory. `rotations`: `RotaryTower.rotations`, if the tower has
        them."""
        self._make, self._make_rotations = make, rotations
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[Grid, bool], Tensor] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, grid: Grid) -> Tensor:
        """`[gh * gw, position_width]`; shared memory, read-only."""
        return self._get(grid, False, self._make)

    @property
    def rotates(self) -> bool:
        """Whether the tower has rotations."""
        return self._make_rotations is not None

    def rotations(self, grid: Grid) -> Tensor:
        """`[gh * gw, rotation_width]` float32; shared memory, read-only."""
        assert self._make_rotations is not None, "the tower rotates nothing"
        return self._get(grid, True, self._make_rotations)

    def _get(self, grid: Grid, rotated: bool, make: Callable[[Grid], Tensor]) -> Tensor:
        key = grid, rotated
        found = self._entries.get(key)
        if found is not None:
            self.hits += 1
            self._entries.move_to_end(key)
            return found
        self.misses += 1
        made = make(grid)
        size = made.numel() * made.element_size()
        if size <= self._max_bytes:
            while self.bytes + size > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.bytes -= oldest.numel() * oldest.element_size()
            self._entries[key] = made
            self.bytes += size
        return made

    def check_integrity(self) -> None:
        """Asserts that the byte count is correct and within the limit."""
        held = sum(entry.numel() * entry.element_size() for entry in self._entries.values())
        assert held == self.bytes <= self._max_bytes, (held, self.bytes, self._max_bytes)
