"""The family's `VisionSpec`: sizes, tower, image and video rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from decoder.positions import Positions
from encoder.item import Grid
from families.lfm3_vl.vision_config import VisionConfig
from families.qwen_images import QwenImageRule
from families.qwen_videos import QwenVideoRule

if TYPE_CHECKING:
    import torch

    from families.lfm3_vl.tower import GridTower
    from kernels.linear import AnyWeight


class GridVision(VisionConfig):
    """Implements `families.family.VisionSpec`."""

    def build(
        self, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> GridTower:  # fmt: skip
        from families.lfm3_vl.tower import GridTower  # imported here: grids and token counts need no torch

        return GridTower(self, weights, dtype=dtype, device=device, native=native, max_rows=max_rows)

    @property
    def image_rule(self) -> QwenImageRule:
        return QwenImageRule(self)

    @property
    def video_rule(self) -> QwenVideoRule:
        return QwenVideoRule(self)

    def positions(self, ids: Sequence[int], blocks: Sequence[tuple[int, Grid]]) -> Positions | None:
        """None: image tokens take one position each, like text."""
        return None
