"""Runs the sequences of one kind of item, by graphs or eagerly."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from encoder.budget import EncoderBudgets
from encoder.graphs import EncoderArena, EncoderGraphs, Verdict
from encoder.item import IMAGE, PatchSequence
from encoder.layout import layout
from encoder.pieces import Pieces, finish
from encoder.positions import PositionCache
from encoder.tower import PackedBatch, Tower, conv_side, patch_order

log = logging.getLogger(__name__)

CALIBRATION_SECONDS = 0.25
"""Seconds that `auto` may spend on calibration on a CPU; budgets that were not reached run eagerly."""
EAGER_TOKENS_ON_CPU = 512
"""Largest eager launch on a CPU, in image tokens: activations then stay in the caches."""


class Lane:
    """Runs packed batches of one kind of item. Without an arena it is eager, for the given reason."""

    def __init__(
        self, tower: Tower, budgets: EncoderBudgets, positions: PositionCache, *, kind: str,
        arena: EncoderArena | None, eager_reason: str = "", calibrate: bool = False,
    ) -> None:  # fmt: skip
        """`calibrate`: time each graph against an eager run and use those that are faster; otherwise use every
        graph."""
        assert arena is not None or eager_reason
        self.tower, self.kind = tower, kind
        self.verdicts: dict[int, Verdict] = {}
        self.graphs: EncoderGraphs | None = None
        self._positions = positions
        self._eager_reason = eager_reason
        if arena is not None:
            self._capture(EncoderGraphs(tower, budgets, positions, arena, kind=kind), budgets, calibrate)
        self.budgets = budgets if self.graphs is not None else self._eager_budgets(budgets)
        """Budgets that batches are packed under: the graphs' budgets, or one size that bounds an eager launch."""

    def _capture(self, graphs: EncoderGraphs, budgets: EncoderBudgets, calibrate: bool) -> None:
        if not calibrate:
            self.verdicts = {budget: Verdict(use=True) for budget in budgets.token_budgets}
        else:
            limit = CALIBRATION_SECONDS if self.tower.device.type == "cpu" else float("inf")
            self.verdicts = graphs.calibrate(self.run_eagerly, seconds=limit)
            self._log_verdicts()
        if any(verdict.use for verdict in self.verdicts.values()):
            self.graphs = graphs
        else:
            graphs.close()
            self._eager_reason = "no_graph_pays"

    def _log_verdicts(self) -> None:
        kind = "encoder graph" if self.kind == IMAGE else f"encoder {self.kind} graph"
        for budget, verdict in self.verdicts.items():
            if verdict.graph_seconds is None or verdict.eager_seconds is None:
                log.info("%s %d: not timed within the start-up limit, left unused", kind, budget)
            else:
                log.info(
                    "%s %d: %.2f ms against %.2f ms eager, %s",
                    kind,
                    budget,
                    verdict.graph_seconds * 1e3,
                    verdict.eager_seconds * 1e3,
                    "used" if verdict.use else "left unused",
                )

    def _eager_budgets(self, budgets: EncoderBudgets) -> EncoderBudgets:
        step = budgets.largest
        if self.tower.device.type == "cpu":
            step = min(step, EAGER_TOKENS_ON_CPU)
        return EncoderBudgets((step,), step)

    @property
    def used_budgets(self) -> list[int]:
        return [budget for budget, verdict in self.verdicts.items() if verdict.use]

    @property
    def unused_budgets(self) -> list[int]:
        return [budget for budget, verdict in self.verdicts.items() if not verdict.use]

    def eager_reason(self, budget: int | None) -> str | None:
        """Why a batch of this budget runs without a graph; None if it runs with one."""
        if self.graphs is None:
            return self._eager_reason
        if budget is None:
            return "too_large"
        return None if self.verdicts[budget].use else "slower_graph"

    def run_eagerly(self, sequences: Sequence[PatchSequence]) -> Tensor:
        """Rows of `sequences` in their order, without padding; new memory."""
        return finish(self.pieces(sequences))

    def pieces(self, sequences: Sequence[PatchSequence]) -> Pieces[Tensor]:
        """`run_eagerly` as a generator that yields after each layer."""
        return self.tower.pieces(self.batch(sequences), kind=self.kind)

    def batch(self, sequences: Sequence[PatchSequence]) -> PackedBatch:
        """`sequences` as a launch without padding."""
        sizes, device = self.tower.sizes, self.tower.device
        placed = layout(
            [part.grid for part in sequences], prefix=sizes.num_prefix_tokens, merge=sizes.merge_size,
            order=patch_order(sizes), side=conv_side(sizes),
        )  # fmt: skip
        around = placed.neighbours_RK
        cache = self._positions
        return PackedBatch(
            patches_TP=torch.cat([part.patches.to(device, self.tower.dtype) for part in sequences]),
            positions_TD=torch.cat([cache.get(part.grid) for part in sequences]),
            source_R=placed.source_R.to(device),
            cu_seqlens=placed.cu_seqlens.to(device),
            token_rows_NM=placed.token_rows_NM.to(device),
            max_seqlen=placed.max_seqlen,
            rotations_TF=torch.cat([cache.rotations(part.grid) for part in sequences]) if cache.rotates else None,
            neighbours_RK=None if around is None else around.to(device),
        )

    def close(self) -> None:
        """Destroys the graphs; idempotent."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
            self._eager_reason = "closed"
