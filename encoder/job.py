"""Encodes a set of images and clips in launches, one launch or a few layers at a time.

Each attention sequence of an item is packed separately, possibly with sequences of other items and in several launches.
Items of different kinds are never in one launch, since their patches pass different projections. Rows of an item that
is to be pruned are gathered first and pruned after its last launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.item import EncoderItem, PatchSequence
from encoder.packing import Packed
from encoder.pieces import Pieces
from encoder.pruning import prune


@dataclass(frozen=True)
class Part:
    """One attention sequence of the item at an index, and where its rows go."""

    item: int
    sequence: PatchSequence
    out: Tensor


@dataclass(frozen=True)
class Launch:
    """The sequences of one pass through the tower."""

    parts: tuple[Part, ...]
    budget: int | None
    kind: str


Packer = Callable[[list[int], str], list[Packed]]
"""Packs token counts of items of one kind into batches."""


class EncodeJob:
    """Call `step` until it returns False; `rows` then has the number of rows of each item's sequences."""

    def __init__(
        self,
        items: Sequence[EncoderItem],
        out: Sequence[Tensor],
        pack: Packer,
        launch: Callable[[Launch], Pieces[None]],
    ) -> None:
        """`items` and `out` have been checked against each other and the model."""
        self.rows: list[tuple[int, ...]] = []
        """For each item, the rows of each of its attention sequences after pruning."""
        self._items, self._out, self._launch = items, out, launch
        self._running: tuple[Launch, Pieces[None]] | None = None
        self._gathered: dict[int, Tensor] = {}
        self._missing = [0] * len(items)
        kinds: dict[str, list[Part]] = {}
        for index, item in enumerate(items):
            parts = self._split(index, item)
            self._missing[index] = len(parts)
            self.rows.append(item.sequence_tokens)
            kinds.setdefault(item.kind, []).extend(parts)
        self._launches: list[Launch] = []
        for kind, parts in kinds.items():
            for batch in pack([part.sequence.tokens for part in parts], kind):
                chosen = tuple(parts[position] for position in batch.indices)
                self._launches.append(Launch(chosen, batch.budget, kind))
        # In the items' order across kinds; reversed, since launches are popped from the end.
        self._launches.sort(key=lambda launch: min(part.item for part in launch.parts), reverse=True)

    def _split(self, index: int, item: EncoderItem) -> list[Part]:
        out, tokens = self._out[index], sum(item.sequence_tokens)
        if item.tokens != tokens:
            out = torch.empty(tokens, out.shape[1], dtype=out.dtype, device=out.device)
            self._gathered[index] = out
        rows = out.split(list(item.sequence_tokens))
        return [Part(index, part, own) for part, own in zip(item.sequences, rows, strict=True)]

    @property
    def launches_left(self) -> int:
        """Launches that are not finished."""
        return len(self._launches) + (self._running is not None)

    @torch.inference_mode()
    def step(self, seconds: float | None = None) -> bool:
        """Runs the current launch to its end, or for `seconds` plus the rest of the current piece; then prunes the
        items that it completed. Returns False when all items are done."""
        if self._running is None:
            if not self._launches:
                return False
            launch = self._launches.pop()
            self._running = launch, self._launch(launch)
        launch, pieces = self._running
        until = float("inf") if seconds is None else time.perf_counter() + seconds
        for _ in pieces:
            if time.perf_counter() >= until:
                return True
        self._running = None
        for part in launch.parts:
            self._missing[part.item] -= 1
            gathered = self._gathered.get(part.item)
            if gathered is not None and not self._missing[part.item]:
                item = self._items[part.item]
                rows_TND = gathered.unflatten(0, (item.num_sequences, item.sequence_tokens[0]))
                self.rows[part.item] = prune(rows_TND, item.pruning_rate, self._out[part.item])
                del self._gathered[part.item]
        return bool(self._launches)
