"""The family's `VisionSpec`: sizes, tower, image and video rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from decoder.positions import Positions
from encoder.item import Grid
from families.nemotron_h_omni.image_rule import OmniImageRule
from families.nemotron_h_omni.video_rule import OmniVideoRule
from families.nemotron_h_omni.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch

    from families.nemotron_h_omni.tower import RadioTower
    from kernels.linear import AnyWeight


class RadioSpec(VisionConfig):
    """The part of `families.family.VisionSpec` that all models with this tower share."""

    def build(
        self, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> RadioTower:  # fmt: skip
        from families.nemotron_h_omni.tower import RadioTower  # imported here: grids and token counts need no torch

        return RadioTower(self, weights, dtype=dtype, device=device, native=native, max_rows=max_rows)

    def limited(self, *, max_model_len: int, video_pruning_rate: float | None = None) -> Self:
        length = min(self.max_model_len, max_model_len)
        rate = self.video_pruning_rate if video_pruning_rate is None else video_pruning_rate
        return replace(self, max_model_len=length, video_pruning_rate=rate)

    def positions(self, ids: Sequence[int], blocks: Sequence[tuple[int, Grid]]) -> Positions | None:
        return None


class RadioVision(RadioSpec):
    """Implements `families.family.VisionSpec`."""

    @property
    def image_rule(self) -> OmniImageRule:
        return OmniImageRule(self)

    @property
    def video_rule(self) -> OmniVideoRule | None:
        return None if self.video_temporal_patch_size is None else OmniVideoRule(self)

    def describe_preprocessing(self) -> str:
        return (
            f"patch {self.patch_size}, merge {self.merge_size}, {self.min_num_patches} to {self.max_num_patches} "
            f"patches, mean {numbers(self.image_mean)}, deviation {numbers(self.image_std)}, "
            f"{self.video_temporal_patch_size or 'no'} frames a patch"
        )


def numbers(values: tuple[float, ...]) -> str:
    """The numbers, with spaces between them."""
    return " ".join(f"{value:g}" for value in values)
