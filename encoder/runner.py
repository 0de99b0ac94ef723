"""The encoder runner: images and clips in, rows out, packed under the token budgets, by graph or eagerly.

Everything is counted. Synchronous and owned by one thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.budget import EncoderBudgets, GraphShape, graph_shape, resolve_budgets
from encoder.graphs import EncoderArena
from encoder.item import IMAGE, VIDEO, EncoderItem, PatchSequence, num_image_tokens
from encoder.job import EncodeJob, Launch
from encoder.lane import Lane
from encoder.packing import Packed, pack
from encoder.pieces import Pieces
from encoder.positions import PositionCache
from encoder.tower import NATIVE_MODES, RotaryTower, TowerSpec, patch_order
from encoder.tune import TokenHistogram
from kernels.linear import AnyWeight
from kernels.varlen_attention import reads_host

log = logging.getLogger(__name__)

GRAPH_MODES = ("auto", "on", "off")
COUNTED = ("batches", "image_batches", "video_batches", "images", "temporal_patches", "real_tokens", "padded_tokens")


def counted_as(kind: str) -> str:
    """The counter of the attention sequences of a kind of item."""
    return {IMAGE: "images", VIDEO: "temporal_patches"}.get(kind, f"{kind}_sequences")


@dataclass(frozen=True)
class EncoderOptions:
    """How a tower is run."""

    dtype: torch.dtype = torch.bfloat16
    """Of weights, activations and the rows handed out."""
    device: torch.device = torch.device("cpu")
    graphs: str = "auto"
    """auto: replay a budget where that was measured to beat eager; on: always; off: never."""
    token_budgets: tuple[int, ...] | None = None
    """Image tokens per graph; None derives doublings from the smallest image to the step."""
    max_images: int | None = None
    """Images per batch; None derives it from the budgets."""
    max_tokens_per_step: int | None = None
    """Image tokens of one launch, the upper end of the budgets; None covers the largest image the rule aims at."""
    graph_kinds: tuple[str, ...] | None = (IMAGE,)
    """Kinds of items that get graphs, all in one arena as wide as the widest patches; None: all that the tower takes.
    The others run eagerly."""
    native: str = "auto"
    """auto: compiled code where a CPU has it; on: only so; off: torch operations."""
    position_cache_bytes: int = 256 << 20
    """Bound of the interpolated position embeddings that are kept."""

    def __post_init__(self) -> None:
        if self.graphs not in GRAPH_MODES:
            raise ValueError(f"graphs must be one of {GRAPH_MODES}, got {self.graphs!r}")
        if self.native not in NATIVE_MODES:
            raise ValueError(f"native must be one of {NATIVE_MODES}, got {self.native!r}")
        if self.max_tokens_per_step is not None and self.max_tokens_per_step < 1:
            raise ValueError(f"max_tokens_per_step must be at least 1, got {self.max_tokens_per_step}")

    def budgets(self, spec: TowerSpec) -> EncoderBudgets:
        """The resolved budgets; `ValueError` with both numbers where they cannot hold."""
        hi = self.max_tokens_per_step or spec.max_image_tokens
        lo = spec.min_image_tokens
        return resolve_budgets(lo, hi, token_budgets=self.token_budgets, max_images=self.max_images)


class EncoderRunner:
    """Owns the tower, the graphs and the position cache; `encode` is the whole job, `begin` the same in steps."""

    def __init__(self, spec: TowerSpec, options: EncoderOptions, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """`weights`: (name, tensor) pairs as `spec.expected_weights` names them, copied, never kept.

        Raises `ValueError` for budgets that cannot hold, missing weights, or `graphs="on"` where nothing can capture.
        """
        self.spec = spec
        self.options = options
        self.budgets = options.budgets(spec)
        device = torch.device(options.device)
        with torch.inference_mode():
            self.tower = spec.build(
                weights, dtype=options.dtype, device=device, native=options.native, max_rows=self._max_rows()
            )
            rotations = self.tower.rotations if isinstance(self.tower, RotaryTower) else None
            self.positions = PositionCache(self.tower.positions, options.position_cache_bytes, rotations)
            self._counts: Counter[str] = Counter()
            self._seconds = 0.0
            self._sizes = TokenHistogram(max(spec.max_image_tokens, self.budgets.largest))
            self.lanes = self._make_lanes()
            """Per kind of item that the weights can take."""

    def _shape(self, budget: int) -> GraphShape:
        spec = self.spec
        return graph_shape(
            budget, self.budgets, prefix=spec.num_prefix_tokens, patches_per_token=spec.patches_per_token
        )

    def _max_rows(self) -> int:
        """Tower rows of the largest launch, but for an image above every budget."""
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
        lanes = {
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
        self._arena_bytes = arena.bytes if arena is not None and any(lane.graphs for lane in lanes.values()) else 0
        return lanes

    # -- work -----------------------------------------------------------------------------------------------------

    def encode(self, items: Sequence[EncoderItem], out: Sequence[Tensor]) -> list[tuple[int, ...]]:
        """Write item i's `[tokens, row_width]` rows, in the options' dtype, into `out[i]`.

        Each row is what the item gets alone, whatever shares its batch. Returns for each item how many rows belong to
        each of its attention sequences, less what pruning dropped.
        Raises `ValueError` naming the position of the first item or destination that does not fit, before anything has
        run.
        """
        job = self.begin(items, out)
        while job.step():
            pass
        return job.rows

    def begin(self, items: Sequence[EncoderItem], out: Sequence[Tensor]) -> EncodeJob:
        """The same, one launch for each `step` of the job or less, so that others get a turn in between."""
        if len(items) != len(out):
            raise ValueError(f"{len(items)} images and {len(out)} destinations")
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
            raise ValueError(f"{name} {index}: merge_size {item.merge_size}, the tower's is {spec.merge_size}")
        if item.order != patch_order(spec):
            raise ValueError(f"{name} {index}: patches by {item.order}, the tower takes them by {patch_order(spec)}")
        expected = (item.tokens, spec.row_width)
        if tuple(rows.shape) != expected or rows.dtype != self.options.dtype:
            raise ValueError(
                f"destination {index}: {tuple(rows.shape)} {rows.dtype}, expected {expected} {self.options.dtype}"
            )

    def _timed(self, pieces: Pieces[None]) -> Pieces[None]:
        """Counts the seconds of each piece, and not those in between."""
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
        """A graph is one piece, an eager launch as many as the tower has layers."""
        # Equal grids become neighbours, whose attention runs as one batch; order inside a launch is otherwise free.
        parts = sorted(launch.parts, key=lambda part: (part.sequence.patches.shape[0], part.sequence.grid))
        group = [self._floats(part.sequence) for part in parts]
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

    def _floats(self, part: PatchSequence) -> PatchSequence:
        """The same with patches as the tower takes them; bytes become floats on its own device."""
        if part.patches.dtype != torch.uint8:
            return part
        patches = self.tower.as_floats(part.patches.to(self.tower.device))
        return PatchSequence(part.grid, patches, part.merge_size, part.order)

    # -- what it is and what it did -------------------------------------------------------------------------------

    def plan(self) -> dict[str, object]:
        """Budgets, buffer sizes and verdicts, as plain numbers and strings."""
        shapes = [self._shape(budget) for budget in self.budgets.token_budgets]
        return {
            "token_budgets": list(self.budgets.token_budgets),
            "max_images": self.budgets.max_images,
            "capacity": [shape.capacity for shape in shapes],
            "rows": [shape.rows for shape in shapes],
            "arena_bytes": self._arena_bytes,
            "scratch_bytes": self.tower.scratch_bytes,
            "graphs": self.options.graphs,
            "used_budgets": self.lanes[IMAGE].used_budgets,
            "unused_budgets": self.lanes[IMAGE].unused_budgets,
            "used_video_budgets": self.lanes[VIDEO].used_budgets if VIDEO in self.lanes else [],
        }

    def stats(self) -> dict[str, int | float]:
        """Counters since the start: replays per budget, eager calls per reason, images, temporal patches of clips,
        tokens, seconds, positions."""
        counts: dict[str, int | float] = dict.fromkeys(COUNTED, 0)
        counts.update(self._counts)
        counts["unused_graphs"] = sum(len(lane.unused_budgets) for lane in self.lanes.values())
        counts["position_hits"] = self.positions.hits
        counts["position_misses"] = self.positions.misses
        counts["position_bytes"] = self.positions.bytes
        counts["encode_seconds"] = self._seconds
        return counts

    def histogram(self) -> dict[int, int]:
        """Image tokens -> images and temporal patches encoded since the start, in at most 1024 bins: what budgets are
        tuned on."""
        return self._sizes.counts()

    def check_integrity(self) -> None:
        """Asserts what must hold between calls."""
        self.positions.check_integrity()
        replays = sum(count for name, count in self._counts.items() if name.startswith("replays_"))
        eager = sum(count for name, count in self._counts.items() if name.startswith("eager_"))
        assert replays + eager == self._counts["batches"], self._counts
        sequences = sum(self._counts[counted_as(kind)] for kind in self.lanes)
        assert sum(self._sizes.counts().values()) == sequences, self._counts

    def close(self) -> None:
        """Tear the graphs down; idempotent. The runner must not be used afterwards."""
        for lane in self.lanes.values():
            lane.close()
