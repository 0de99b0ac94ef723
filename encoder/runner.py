"""The encoder runner: packs images and clips under token budgets, runs the tower by graphs or eagerly, and returns
rows.

An `EncodeJob` encodes the items of one call in launches, one launch or a few layers at a time. Each attention sequence
of an item is packed separately, possibly with sequences of other items and in several launches. Items of different
kinds are never in one launch, since their patches pass different projections. Rows of an item that is to be pruned are
gathered first and pruned after its last launch.

Synchronous, used by one thread, with counters for everything it does.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.budget import EncoderBudgets, GraphShape, graph_shape, resolve_budgets
from encoder.graphs import EncoderArena
from encoder.item import IMAGE, VIDEO, EncoderItem, PatchSequence, num_image_tokens
from encoder.lane import Lane
from encoder.packing import Packed, pack
from encoder.pieces import Pieces
from encoder.positions import PositionCache
from encoder.pruning import prune
from encoder.tower import NATIVE_MODES, RotaryTower, TowerSpec, patch_order
from encoder.tune import TokenHistogram
from kernels.linear import AnyWeight
from kernels.varlen_attention import reads_host

log = logging.getLogger(__name__)

GRAPH_MODES = ("auto", "on", "off")
COUNTED = ("batches", "image_batches", "video_batches", "images", "temporal_patches", "real_tokens", "padded_tokens")


def counted_as(kind: str) -> str:
    """Name of the counter of attention sequences of a kind of item."""
    return {IMAGE: "images", VIDEO: "temporal_patches"}.get(kind, f"{kind}_sequences")


@dataclass(frozen=True)
class EncoderOptions:
    """Options of an encoder runner."""

    dtype: torch.dtype = torch.bfloat16
    """Dtype of weights, activations and output rows."""
    device: torch.device = torch.device("cpu")
    graphs: str = "auto"
    """auto: use a budget's graph if it was measured to beat eager runs; on: always; off: never."""
    token_budgets: tuple[int, ...] | None = None
    """Image tokens per graph; None: doublings from the smallest image to `max_tokens_per_step`."""
    max_images: int | None = None
    """Images per batch; None: derived from the budgets."""
    max_tokens_per_step: int | None = None
    """Largest launch, in image tokens, and the upper end of the budgets; None: the largest image that the rule aims
    at."""
    graph_kinds: tuple[str, ...] | None = (IMAGE,)
    """Kinds of items that have graphs, all in one arena as wide as the widest patches; None: all kinds of the tower.
    Other kinds run eagerly."""
    native: str = "auto"
    """auto: compiled code where a CPU supports it; on: compiled code or an error; off: torch operations."""
    position_cache_bytes: int = 256 << 20
    """Limit on the cached position embeddings, in bytes."""

    def __post_init__(self) -> None:
        if self.graphs not in GRAPH_MODES:
            raise ValueError(f"graphs must be one of {GRAPH_MODES}, got {self.graphs!r}")
        if self.native not in NATIVE_MODES:
            raise ValueError(f"native must be one of {NATIVE_MODES}, got {self.native!r}")
        if self.max_tokens_per_step is not None and self.max_tokens_per_step < 1:
            raise ValueError(f"max_tokens_per_step must be at least 1, got {self.max_tokens_per_step}")

    def budgets(self, spec: TowerSpec) -> EncoderBudgets:
        """The resolved budgets. Raises `ValueError` naming both numbers if they contradict each other."""
        hi = self.max_tokens_per_step or spec.max_image_tokens
        lo = spec.least_budget
        return resolve_budgets(lo, hi, token_budgets=self.token_budgets, max_images=self.max_images)


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


_Packer = Callable[[list[int], str], list[Packed]]
"""Packs token counts of items of one kind into batches."""


class EncodeJob:
    """Call `step` until it returns False; `rows` then has the number of rows of each item's sequences."""

    def __init__(
        self,
        items: Sequence[EncoderItem],
        out: Sequence[Tensor],
        pack: _Packer,
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


class EncoderRunner:
    """Owns the tower, its graphs and the position cache. `encode` runs a whole job; `begin` returns one to run step by
    step."""

    def __init__(self, spec: TowerSpec, options: EncoderOptions, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """`weights`: (name, tensor) pairs named as in `spec.expected_weights`; they are copied.

        Raises `ValueError` for contradictory budgets, missing weights, or `graphs="on"` where nothing can be captured.
        """
        self.spec = spec
        self.options = options
        self.budgets = options.budgets(spec)
        with torch.inference_mode():
            self.tower = spec.build(
                weights, dtype=options.dtype, device=options.device, native=options.native, max_rows=self._max_rows()
            )
            rotations = self.tower.rotations if isinstance(self.tower, RotaryTower) else None
            self.positions = PositionCache(self.tower.positions, options.position_cache_bytes, rotations)
            self._counts: Counter[str] = Counter()
            self._seconds = 0.0
            self._sizes = TokenHistogram(max(spec.max_image_tokens, self.budgets.largest))
            self.lanes = self._make_lanes()
            """One lane per kind of item that the weights support."""

    def _shape(self, budget: int) -> GraphShape:
        spec = self.spec
        return graph_shape(
            budget, self.budgets, prefix=spec.num_prefix_tokens, patches_per_token=spec.patches_per_token
        )

    def _max_rows(self) -> int:
        """Tower rows of the largest launch, except for images larger than every budget."""
        return self._shape(self.budgets.largest).rows

    def _make_lanes(self) -> dict[str, Lane]:
        tower, options = self.tower, self.options
        no_graph = "" if options.graphs != "off" else "off"
        if options.graphs != "off" and reads_host(tower.device.type):
            kind = tower.device.type
            reason = f"the attention for {kind} reads sequence lengths on the host, which no graph can hold"
            if options.graphs == "on":
                raise ValueError(f"graphs=on: {reason}")
            log.info("encoder graphs are off: %s", reason)
            no_graph = "host_reads"
        wanted = tower.kinds if options.graph_kinds is None else options.graph_kinds
        graphed = [kind for kind in tower.kinds if kind in wanted]
        arena = None if no_graph or not graphed else EncoderArena(tower, self.budgets, graphed)
        return {
            kind: Lane(
                tower,
                self.budgets,
                self.positions,
                kind=kind,
                arena=arena if kind in graphed else None,
                eager_reason=no_graph or f"no_{kind}_graphs",
                calibrate=options.graphs == "auto",
            )
            for kind in tower.kinds
        }

    # -- work -----------------------------------------------------------------------------------------------------

    def encode(self, items: Sequence[EncoderItem], out: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Writes the `[tokens, row_width]` rows of item i, in the options' dtype, into `out[i]`.

        An item's rows do not depend on the other items. Returns for each item the rows of each of its attention
        sequences after pruning.

        Raises `ValueError` naming the index of the first item or destination that does not fit, before anything has
        run.
        """
        job = self.begin(items, out)
        while job.step():
            pass
        return job.rows

    def begin(self, items: Sequence[EncoderItem], out: Sequence[Tensor]) -> EncodeJob:
        """Like `encode`, as a job whose `step` runs at most one launch, so that other work can run in between."""
        if len(items) != len(out):
            raise ValueError(f"{len(items)} items need as many destinations, got {len(out)}")
        for index, (item, rows) in enumerate(zip(items, out)):
            self._check(index, item, rows)
        return EncodeJob(items, out, self._pack, lambda launch: self._timed(self._launch(launch)))

    def _pack(self, tokens: list[int], kind: str) -> list[Packed]:
        return pack(tokens, self.lanes[kind].budgets)

    def _check(self, index: int, item: EncoderItem, rows: Tensor) -> None:
        spec = self.spec
        name = item.kind
        if name not in self.lanes:
            raise ValueError(f"{name} {index}: this checkpoint has no projection for items of kind {name!r}")
        try:
            for grid in {*item.grids}:
                num_image_tokens(grid, merge_size=spec.merge_size)
        except ValueError as error:
            raise ValueError(f"{name} {index}: {error}") from error
        wanted = (item.num_patches, spec.patch_widths[name])
        if tuple(item.patches.shape) != wanted:
            raise ValueError(f"{name} {index}: patches of shape {tuple(item.patches.shape)}, expected {wanted}")
        if item.merge_size != spec.merge_size:
            raise ValueError(f"{name} {index}: merge_size {item.merge_size}, but the tower has {spec.merge_size}")
        if item.order != patch_order(spec):
            raise ValueError(f"{name} {index}: patches by {item.order}, but the tower takes {patch_order(spec)}")
        expected = (item.tokens, spec.row_width)
        if tuple(rows.shape) != expected or rows.dtype != self.options.dtype:
            raise ValueError(
                f"destination {index}: {tuple(rows.shape)} {rows.dtype}, expected {expected} {self.options.dtype}"
            )

    def _timed(self, pieces: Pieces[None]) -> Pieces[None]:
        """Adds up the seconds of each piece, without the time in between."""
        while True:
            start = time.perf_counter()
            try:
                next(pieces)
            except StopIteration:
                return
            finally:
                self._seconds += time.perf_counter() - start
            yield

    def _launch(self, launch: Launch) -> Pieces[None]:
        """Runs a launch. A graph is one piece; an eager launch has as many pieces as the tower has layers."""
        # Sequences of equal grids become neighbours, so that their attention runs as one batch; the order is otherwise
        # free.
        parts = sorted(launch.parts, key=lambda part: (part.sequence.patches.shape[0], part.sequence.grid))
        group = [self._floats(part.sequence, launch.kind) for part in parts]
        tokens = sum(sequence.tokens for sequence in group)
        lane = self.lanes[launch.kind]
        reason = lane.eager_reason(launch.budget)
        if reason is None:
            assert lane.graphs is not None and launch.budget is not None
            rows = lane.graphs.run(launch.budget, group)
            self._counts[f"replays_{launch.budget}"] += 1
            self._counts["padded_tokens"] += lane.graphs.arena.shapes[launch.budget].capacity - tokens
        else:
            rows = yield from lane.pieces(group)
            self._counts[f"eager_{reason}"] += 1
        first = 0
        for part in parts:
            end = first + part.sequence.tokens
            part.out.copy_(rows[first:end])
            self._sizes.add(end - first)
            first = end
        self._counts["batches"] += 1
        self._counts[f"{launch.kind}_batches"] += 1
        self._counts[counted_as(launch.kind)] += len(parts)
        self._counts["real_tokens"] += tokens

    def _floats(self, part: PatchSequence, kind: str) -> PatchSequence:
        """The sequence with patches in the tower's dtype; uint8 patches are normalised on the tower's device."""
        if part.patches.dtype != torch.uint8:
            return part
        patches = self.tower.as_floats(part.patches.to(self.tower.device), kind=kind)
        return PatchSequence(part.grid, patches, part.merge_size, part.order)

    # -- counters, end --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Counters since the start: replays per budget, eager calls per reason, images, temporal patches of clips,
        tokens, seconds, and the position cache."""
        counts: dict[str, int | float] = dict.fromkeys(COUNTED, 0)
        counts.update(self._counts)
        counts["unused_graphs"] = sum(len(lane.unused_budgets) for lane in self.lanes.values())
        counts["position_hits"] = self.positions.hits
        counts["position_misses"] = self.positions.misses
        counts["position_bytes"] = self.positions.bytes
        counts["encode_seconds"] = self._seconds
        return counts

    def histogram(self) -> dict[int, int]:
        """Image tokens -> images and temporal patches encoded since the start, in at most 1024 bins. Input for tuning
        budgets."""
        return self._sizes.counts()

    def check_integrity(self) -> None:
        """Asserts the invariants that hold between calls."""
        self.positions.check_integrity()
        replays = sum(count for name, count in self._counts.items() if name.startswith("replays_"))
        eager = sum(count for name, count in self._counts.items() if name.startswith("eager_"))
        assert replays + eager == self._counts["batches"], self._counts
        sequences = sum(self._counts[counted_as(kind)] for kind in self.lanes)
        assert sum(self._sizes.counts().values()) == sequences, self._counts

    def close(self) -> None:
        """Destroys the graphs; idempotent. The runner must not be used afterwards."""
        for lane in self.lanes.values():
            lane.close()
