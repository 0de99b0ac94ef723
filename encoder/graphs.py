"""One graph per token budget over one shared arena: static buffers, calibration against eager runs, teardown.

The largest budget sizes the arena, and every budget's buffers are views of it, so a batch of one budget leaves stale
rows in another. `EncoderArena.fill` clears exactly the stale rows inside the view that is about to run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.budget import EncoderBudgets, GraphShape, graph_shape
from encoder.item import IMAGE, PatchSequence
from encoder.layout import Layout, layout
from encoder.pieces import finish
from encoder.plan import buffer_sizes
from encoder.positions import PositionCache
from encoder.tower import PackedBatch, Tower, conv_side, patch_order, rotation_width
from kernels.graphs import GraphPool, StaticGraph

log = logging.getLogger(__name__)

COMPARISONS = 5
"""Times that a calibration runs each side; the best run counts, so the first serves as warm-up."""
COMPARISON_SECONDS = 0.05
"""Seconds after which the comparison of one budget ends early: noise is small for calls that long."""
CLEAR_WIN = 0.95
"""A replay must take at most this share of the eager time: a smaller gain may be noise, and the graph's padding
costs."""

INPUTS = ("patches", "positions", "source", "cu_seqlens", "token_rows")
"""Buffers that every tower reads; towers with rotations have `rotations` too, those with convolutions `neighbours`."""


class EncoderArena:
    """Static buffers of the largest budget. `view` returns those of any budget, `fill` writes a batch into one.

    The host writes the buffers between replays; a graph reads them during a replay.
    """

    def __init__(self, tower: Tower, budgets: EncoderBudgets, kinds: Collection[str] = (IMAGE,)) -> None:
        """`kinds`: kinds of items whose graphs share the memory; the patch buffer is as wide as the widest of them."""
        sizes = tower.sizes
        self.kinds = frozenset(kinds)
        self.pool = GraphPool(tower.device)
        self._tower = tower
        self._merge = sizes.merge_size
        self._prefix = sizes.num_prefix_tokens
        self.shapes = {
            budget: graph_shape(budget, budgets, prefix=self._prefix, patches_per_token=sizes.patches_per_token)
            for budget in budgets.token_budgets
        }
        buffers = buffer_sizes(self.shapes[budgets.largest], sizes, kinds)
        self.buffers = {
            name: torch.zeros(size, dtype=kind or tower.dtype, device=tower.device)
            for name, (size, kind) in buffers.items()
        }
        # For each buffer the number of leading elements that an earlier batch may have left non-zero.
        self._dirty = dict.fromkeys(("patches", "positions", *("rotations",) * bool(rotation_width(sizes))), 0)
        self._order, self._side = patch_order(sizes), conv_side(sizes)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.buffers.values())

    def view(self, budget: int, *, kind: str = IMAGE) -> dict[str, Tensor]:
        """The buffers of one budget and kind (`rows` is the output); they alias those of every other budget."""
        assert kind in self.kinds, (kind, self.kinds)
        sizes = buffer_sizes(self.shapes[budget], self._tower.sizes, (kind,))
        return {name: self.buffers[name].view(-1)[: math.prod(size)].view(size) for name, (size, _) in sizes.items()}

    def fill(
        self, budget: int, sequences: Sequence[PatchSequence], positions: PositionCache, *, kind: str = IMAGE
    ) -> Layout:
        """Copies a batch into the view of `budget`: `[0, n)` is written, stale rows after it are cleared."""
        shape = self.shapes[budget]
        grids = [part.grid for part in sequences]
        placed = layout(
            grids, prefix=self._prefix, merge=self._merge, shape=shape, order=self._order, side=self._side
        )  # fmt: skip
        buffers = self.view(budget, kind=kind)
        row = 0
        for part in sequences:
            end = row + part.patches.shape[0]
            buffers["patches"][row:end].copy_(part.patches)
            buffers["positions"][row:end].copy_(positions.get(part.grid))
            if positions.rotates:
                buffers["rotations"][row:end].copy_(positions.rotations(part.grid))
            row = end
        for name in self._dirty:
            self._clear_stale(name, buffers[name], row)
        buffers["source"].copy_(placed.source_R)
        buffers["cu_seqlens"].copy_(placed.cu_seqlens)
        buffers["token_rows"].copy_(placed.token_rows_NM)
        if placed.neighbours_RK is not None:
            buffers["neighbours"].copy_(placed.neighbours_RK)
        return placed

    def _clear_stale(self, name: str, view: Tensor, rows: int) -> None:
        written, room, dirty = rows * view.shape[1], view.numel(), self._dirty[name]
        stale = min(dirty, room)
        if stale > written:
            view.view(-1)[written:stale].zero_()
        # What an earlier, larger batch left beyond this view is still there.
        self._dirty[name] = dirty if dirty > room else written


def _inputs(view: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: view[name] for name in (*INPUTS, "rotations", "neighbours") if name in view}


def _step(tower: Tower, shape: GraphShape, kind: str) -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]:
    """The tower over one budget's buffers. `max_seqlen` is a constant of the graph: the padding sequence may take every
    row."""

    def run(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        batch = PackedBatch(
            patches_TP=inputs["patches"],
            positions_TD=inputs["positions"],
            source_R=inputs["source"],
            cu_seqlens=inputs["cu_seqlens"],
            token_rows_NM=inputs["token_rows"],
            max_seqlen=shape.rows,
            rotations_TF=inputs.get("rotations"),
            neighbours_RK=inputs.get("neighbours"),
        )
        outputs["rows"].copy_(finish(tower.pieces(batch, kind=kind)))

    return run


@dataclass(frozen=True)
class Verdict:
    """Result of calibrating one budget; seconds are None if it was not timed."""

    use: bool
    graph_seconds: float | None = None
    eager_seconds: float | None = None


class EncoderGraphs:
    """The graphs of all budgets for one kind of item. `run` replays one; `calibrate` decides which are used."""

    def __init__(
        self, tower: Tower, budgets: EncoderBudgets, positions: PositionCache, arena: EncoderArena, *,
        kind: str = IMAGE,
    ) -> None:  # fmt: skip
        """Captures every budget, largest first, so that the smaller ones reuse the pool's memory."""
        self.arena = arena
        self._tower = tower
        self._budgets = budgets
        self._positions = positions
        self._kind = kind
        self._graphs: dict[int, StaticGraph] = {}
        for budget in reversed(budgets.token_budgets):
            view = arena.view(budget, kind=kind)
            graph = StaticGraph(
                f"encoder-{budget}" if kind == IMAGE else f"encoder-{kind}-{budget}",
                _step(tower, arena.shapes[budget], kind),
                _inputs(view),
                {"rows": view["rows"]},
                pool=arena.pool,
            )
            if tower.device.type == "cuda":
                arena.fill(budget, [self._sample(budget)], positions, kind=kind)
            graph.capture()
            self._graphs[budget] = graph

    def run(self, budget: int, sequences: Sequence[PatchSequence]) -> Tensor:
        """Rows of `sequences` in their order, `[tokens, row_width]`: a view of the arena, valid until the next
        `run`."""
        placed = self.arena.fill(budget, sequences, self._positions, kind=self._kind)
        view = self.arena.view(budget, kind=self._kind)
        outputs = self._graphs[budget].replay(_inputs(view))
        return outputs["rows"][: placed.tokens]

    def _sample(self, tokens: int) -> PatchSequence:
        """A synthetic, about square sequence of at most `tokens` image tokens."""
        sizes = self._tower.sizes
        rows = max(math.isqrt(tokens), 1)
        grid = (rows * sizes.merge_size, tokens // rows * sizes.merge_size)
        patches = torch.zeros(grid[0] * grid[1], sizes.patch_widths[self._kind], dtype=self._tower.dtype)
        return PatchSequence(grid, patches, sizes.merge_size, patch_order(sizes))

    def calibrate(self, eager: Callable[[Sequence[PatchSequence]], Tensor], *, seconds: float) -> dict[int, Verdict]:
        """Times each budget's replay against `eager`, on a batch halfway between the budget below and this one.

        Budgets are timed in ascending order until `seconds` have passed; the remaining ones are not used. On a CPU they
        would most likely lose: a replay saves no launches there, and padding is additional work.
        """
        verdicts: dict[int, Verdict] = {}
        smallest = self._budgets.token_budgets[0]
        # warm-up: the first calls build and cache what later ones reuse
        self._compare(smallest, [self._sample(1)], eager)
        start = time.perf_counter()
        below = 0
        for budget in self._budgets.token_budgets:
            if time.perf_counter() - start > seconds:
                verdicts[budget] = Verdict(use=False)
                continue
            sample = [self._sample(max((below + budget + 1) // 2, 1))]
            verdicts[budget] = self._compare(budget, sample, eager)
            below = budget
        return verdicts

    def _compare(
        self, budget: int, sample: Sequence[PatchSequence], eager: Callable[[Sequence[PatchSequence]], Tensor]
    ) -> Verdict:
        """Best seconds of each side, run alternately so that a busy moment affects both."""
        replay = plain = math.inf
        start = time.perf_counter()
        for _ in range(COMPARISONS):
            replay = min(replay, self._seconds(lambda: self.run(budget, sample)))
            plain = min(plain, self._seconds(lambda: eager(sample)))
            if time.perf_counter() - start > COMPARISON_SECONDS:
                break
        return Verdict(replay < CLEAR_WIN * plain, replay, plain)

    def _seconds(self, call: Callable[[], Tensor]) -> float:
        cuda = self._tower.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._tower.device)
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize(self._tower.device)
        return time.perf_counter() - start

    def close(self) -> None:
        """Destroys all graphs; idempotent."""
        for graph in self._graphs.values():
            graph.close()
