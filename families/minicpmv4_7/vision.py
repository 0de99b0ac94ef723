"""The family's `VisionSpec`: that of MiniCPM-V 4.6 with other positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decoder.positions import Positions
from encoder.item import Grid
from families.minicpmv4_6.vision import SlicingVision
from families.minicpmv4_7.positions import Markers, canvas_positions


@dataclass(frozen=True, kw_only=True)
class CanvasVision(SlicingVision):
    """Implements `families.family.VisionSpec`."""

    markers: Markers

    def positions(self, ids: Sequence[int], blocks: Sequence[tuple[int, Grid]]) -> Positions:
        return canvas_positions(ids, blocks, self.markers, merge_size=self.merge_size)
