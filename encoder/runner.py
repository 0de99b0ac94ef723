"""The encoder runner: images in, rows out, packed under the token budgets, by graph or eagerly, everything counted.

Synchronous and owned by one thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.budget import EncoderBudgets, graph_shape, resolve_budgets
from encoder.config import VisionConfig
from encoder.graphs import EncoderGraphs, Verdict
from encoder.layout import layout
from encoder.model import PackedBatch, VisionTower
from encoder.packing import Packed, pack
from encoder.positions import PositionCache
from encoder.preprocess import ImagePatches, num_image_tokens
from encoder.tune import TokenHistogram
from kernels.varlen_attention import reads_host

log = logging.getLogger(__name__)

GRAPH_MODES = ("auto", "on", "off")
CALIBRATION_SECONDS = 0.25
"""Time that `auto` may spend on a CPU; budgets not reached stay eager."""
EAGER_TOKENS_ON_CPU = 512
"""Where nothing is replayed on a CPU, images share a launch up to this size: beyond it activations leave the caches."""


@dataclass(frozen=True)
class EncoderOptions:
    """How a tower is run."""

    dtype: torch.dtype = torch.bfloat16
    """Of weights, activations and the rows handed out."""
    device: torch.device = torch.device("cpu")
    graphs: str = "auto"
    """auto: replay a budget where that was measured to beat eager; on: always; off: never."""
    token_budgets: tuple[int, ...] | None = None
    """Image tokens per graph; None derives doublings from the smallest picture to the step."""
    max_images: int | None = None
    """Images per batch; None derives it from the budgets."""
    max_tokens_per_step: int | None = None
    """Image tokens of one launch, the upper end of the budgets; None covers the largest picture the rule aims at."""
    position_cache_bytes: int = 256 << 20
    """Bound of the interpolated position embeddings that are kept."""

    def __post_init__(self) -> None:
        if self.graphs not in GRAPH_MODES:
            raise ValueError(f"graphs must be one of {GRAPH_MODES}, got {self.graphs!r}")
        if self.max_tokens_per_step is not None and self.max_tokens_per_step < 1:
            raise ValueError(f"max_tokens_per_step must be at least 1, got {self.max_tokens_per_step}")

    def budgets(self, config: VisionConfig) -> EncoderBudgets:
        """The resolved budgets; `ValueError` with both numbers where they cannot hold."""
        hi = self.max_tokens_per_step or config.max_image_tokens
        lo = config.min_image_tokens
        return resolve_budgets(lo, hi, token_budgets=self.token_budgets, max_images=self.max_images)


class EncoderRunner:
    """Owns the tower, the graphs and the position cache; `encode` is the whole job."""

    def __init__(self, config: VisionConfig, options: EncoderOptions, weights: Iterable[tuple[str, Tensor]]) -> None:
        """`weights`: (name, tensor) pairs as `config.expected_weights` names them, copied, never kept.

        Raises `ValueError` for budgets that cannot hold, missing weights, or `graphs="on"` where nothing can capture.
        """
        self.config = config
        self.options = options
        self.budgets = options.budgets(config)
        device = torch.device(options.device)
        with torch.inference_mode():
            self.tower = VisionTower(config, weights, dtype=options.dtype, device=device)
            self.positions = PositionCache(self.tower.position_table, config.table_side, options.position_cache_bytes)
            self._counts: Counter[str] = Counter()
            self._seconds = 0.0
            self._sizes = TokenHistogram(max(config.max_image_tokens, self.budgets.largest))
            self._verdicts: dict[int, Verdict] = {}
            self._graphs = self._make_graphs()
        self._eager_budgets = self._grouping()

    # -- start-up -------------------------------------------------------------------------------------------------

    def _make_graphs(self) -> EncoderGraphs | None:
        device, mode = self.tower.device, self.options.graphs
        if mode == "off":
            return None
        if device.type != "cpu" and reads_host(device):
            reason = f"the attention for {device.type} reads sequence lengths on the host, which no graph can hold"
            if mode == "on":
                raise ValueError(f"graphs=on: {reason}")
            log.info("encoder graphs are off: %s", reason)
            return None
        graphs = EncoderGraphs(self.tower, self.budgets, self.positions)
        if mode == "on":
            self._verdicts = {budget: Verdict(use=True) for budget in self.budgets.token_budgets}
            return graphs
        limit = CALIBRATION_SECONDS if device.type == "cpu" else float("inf")
        self._verdicts = graphs.calibrate(self._run_eagerly, seconds=limit)
        self._log_verdicts()
        if any(verdict.use for verdict in self._verdicts.values()):
            return graphs
        graphs.close()
        return None

    def _log_verdicts(self) -> None:
        for budget, verdict in self._verdicts.items():
            if verdict.graph_seconds is None or verdict.eager_seconds is None:
                log.info("encoder graph %d: not timed within the start-up limit, left unused", budget)
            else:
                log.info(
                    "encoder graph %d: %.2f ms against %.2f ms eager, %s",
                    budget,
                    verdict.graph_seconds * 1e3,
                    verdict.eager_seconds * 1e3,
                    "used" if verdict.use else "left unused",
                )

    def _grouping(self) -> EncoderBudgets:
        """What batches are packed under: the budgets, or, with no graph to fill, one size that limits a launch."""
        if self._graphs is not None:
            return self.budgets
        step = self.budgets.largest
        if self.tower.device.type == "cpu":
            step = min(step, EAGER_TOKENS_ON_CPU)
        return EncoderBudgets((step,), step)

    # -- work -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def encode(self, images: Sequence[ImagePatches], out: Sequence[Tensor]) -> None:
        """Write image i's `[tokens, text_hidden]` rows, in the options' dtype, into `out[i]`.

        Each row is what the image gets alone, whatever shares its batch. Raises `ValueError` naming the position of
        the first image or destination that does not fit, before anything has run.
        """
        if len(images) != len(out):
            raise ValueError(f"{len(images)} images and {len(out)} destinations")
        for index, (image, rows) in enumerate(zip(images, out)):
            self._check(index, image, rows)
        start = time.perf_counter()
        for batch in pack([image.tokens for image in images], self._eager_budgets):
            self._launch(batch, images, out)
        self._seconds += time.perf_counter() - start

    def _check(self, index: int, image: ImagePatches, rows: Tensor) -> None:
        config = self.config
        try:
            tokens = num_image_tokens(image.grid, merge_size=config.merge_size)
        except ValueError as error:
            raise ValueError(f"image {index}: {error}") from error
        count = image.grid[0] * image.grid[1]
        if tuple(image.patches.shape) != (count, config.patch_dim):
            shape = tuple(image.patches.shape)
            raise ValueError(f"image {index}: patches of shape {shape}, expected {(count, config.patch_dim)}")
        expected = (tokens, config.text_hidden_size)
        if tuple(rows.shape) != expected or rows.dtype != self.options.dtype:
            raise ValueError(
                f"destination {index}: {tuple(rows.shape)} {rows.dtype}, expected {expected} {self.options.dtype}"
            )

    def _launch(self, batch: Packed, images: Sequence[ImagePatches], out: Sequence[Tensor]) -> None:
        # Equal grids become neighbours, whose attention runs as one batch; order inside a launch is otherwise free.
        indices = sorted(batch.indices, key=lambda index: (images[index].patches.shape[0], images[index].grid))
        group = [images[index] for index in indices]
        tokens = sum(image.tokens for image in group)
        reason = self._eager_reason(batch)
        if reason is None:
            assert self._graphs is not None and batch.budget is not None
            rows = self._graphs.run(batch.budget, group)
            self._counts[f"replays_{batch.budget}"] += 1
            self._counts["padded_tokens"] += self._graphs.arena.shapes[batch.budget].capacity - tokens
        else:
            rows = self._run_eagerly(group)
            self._counts[f"eager_{reason}"] += 1
        first = 0
        for index, image in zip(indices, group):
            out[index].copy_(rows[first : first + image.tokens])
            first += image.tokens
            self._sizes.add(image.tokens)
        self._counts["batches"] += 1
        self._counts["images"] += len(group)
        self._counts["real_tokens"] += tokens

    def _eager_reason(self, batch: Packed) -> str | None:
        """Why a batch runs without a graph, or None if it does not."""
        if self._graphs is None:
            return "off" if self.options.graphs == "off" else "no_graph_pays"
        if batch.budget is None:
            return "too_large"
        return None if self._verdicts[batch.budget].use else "slower_graph"

    def _run_eagerly(self, images: Sequence[ImagePatches]) -> Tensor:
        """Rows of `images` in their order, at exactly their size; new memory."""
        config, device = self.config, self.tower.device
        placed = layout([image.grid for image in images], prefix=config.num_prefix_tokens, merge=config.merge_size)
        batch = PackedBatch(
            patches_TP=torch.cat([image.patches.to(device, self.tower.dtype) for image in images]),
            positions_TD=torch.cat([self.positions.get(image.grid) for image in images]),
            source_R=placed.source_R.to(device),
            cu_seqlens=placed.cu_seqlens.to(device),
            token_rows_NM=placed.token_rows_NM.to(device),
            max_seqlen=placed.max_seqlen,
        )
        return self.tower.forward(batch)

    # -- what it is and what it did -------------------------------------------------------------------------------

    def plan(self) -> dict[str, object]:
        """Budgets, buffer sizes and verdicts, as plain numbers and strings."""
        config = self.config
        shapes = [
            graph_shape(
                budget, self.budgets, prefix=config.num_prefix_tokens, patches_per_token=config.patches_per_token
            )
            for budget in self.budgets.token_budgets
        ]
        return {
            "token_budgets": list(self.budgets.token_budgets),
            "max_images": self.budgets.max_images,
            "capacity": [shape.capacity for shape in shapes],
            "rows": [shape.rows for shape in shapes],
            "arena_bytes": 0 if self._graphs is None else self._graphs.arena.bytes,
            "graphs": self.options.graphs,
            "used_budgets": [budget for budget, verdict in self._verdicts.items() if verdict.use],
            "unused_budgets": [budget for budget, verdict in self._verdicts.items() if not verdict.use],
        }

    def stats(self) -> dict[str, int | float]:
        """Counters since the start: replays per budget, eager calls per reason, images, tokens, seconds, positions."""
        counts: dict[str, int | float] = dict.fromkeys(("batches", "images", "real_tokens", "padded_tokens"), 0)
        counts.update(self._counts)
        counts["unused_graphs"] = sum(not verdict.use for verdict in self._verdicts.values())
        counts["position_hits"] = self.positions.hits
        counts["position_misses"] = self.positions.misses
        counts["position_bytes"] = self.positions.bytes
        counts["encode_seconds"] = self._seconds
        return counts

    def histogram(self) -> dict[int, int]:
        """Image tokens -> pictures encoded since the start, in at most 1024 bins: what budgets are tuned on."""
        return self._sizes.counts()

    def check_integrity(self) -> None:
        """Asserts what must hold between calls."""
        self.positions.check_integrity()
        replays = sum(count for name, count in self._counts.items() if name.startswith("replays_"))
        eager = sum(count for name, count in self._counts.items() if name.startswith("eager_"))
        assert replays + eager == self._counts["batches"], self._counts
        assert sum(self._sizes.counts().values()) == self._counts["images"], self._counts

    def close(self) -> None:
        """Tear the graphs down; idempotent. The runner must not be used afterwards."""
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
