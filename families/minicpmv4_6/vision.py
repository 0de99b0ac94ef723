"""The family's `VisionSpec`: sizes, tower, image and video rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from decoder.positions import Positions
from encoder.item import Grid
from families.minicpmv4_6.image_rule import SlicedImageRule
from families.minicpmv4_6.slicing import Slicing
from families.minicpmv4_6.video_rule import SlicedVideoRule
from families.minicpmv4_6.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch

    from families.minicpmv4_6.tower import MergingTower
    from kernels.linear import AnyWeight


class SlicingVision(VisionConfig):
    """Implements `families.family.VisionSpec`."""

    def build(
        self, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> MergingTower:  # fmt: skip
        from families.minicpmv4_6.tower import MergingTower  # imported here: grids and token counts need no torch

        return MergingTower(self, weights, dtype=dtype, device=device, native=native, max_rows=max_rows)

    @property
    def image_rule(self) -> SlicedImageRule:
        return SlicedImageRule(self)

    @property
    def video_rule(self) -> SlicedVideoRule | None:
        return None if self.video is None else SlicedVideoRule(self)

    def limited(self, *, max_model_len: int, video_pruning_rate: float | None = None) -> SlicingVision:
        if video_pruning_rate:
            raise ValueError(
                f"video_pruning_rate {video_pruning_rate:g}: this model's videos cannot be pruned; 0 would work"
            )
        return replace(self, max_model_len=max_model_len)

    def positions(self, ids: Sequence[int], blocks: Sequence[tuple[int, Grid]]) -> Positions | None:
        """None: image tokens take one position each, like text."""
        return None

    def describe_preprocessing(self) -> str:
        videos = "" if self.video is None else f", videos {_described(self.video)}"
        return f"patch {self.patch_size}, merge {self.merge_size}, {_described(self.image)}{videos}"


def _described(slicing: Slicing) -> str:
    mean, std = (" ".join(f"{v:g}" for v in values) for values in (slicing.mean, slicing.std))
    slices = slicing.max_slice_nums if slicing.slice_mode else 0
    return f"{slices} slices of {slicing.scale_resolution} pixels, mean {mean}, deviation {std}"
