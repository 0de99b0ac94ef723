"""The family's `VisionSpec`: sizes, tower and image rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from decoder.positions import Positions
from encoder.item import Grid
from families.lfm2_vl.image_rule import TiledImageRule
from families.lfm2_vl.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch

    from families.lfm2_vl.tower import NaFlexTower
    from kernels.linear import AnyWeight


class TiledVision(VisionConfig):
    """Implements `families.family.VisionSpec`."""

    def build(
        self, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> NaFlexTower:  # fmt: skip
        from families.lfm2_vl.tower import NaFlexTower  # imported here: grids and token counts need no torch

        return NaFlexTower(self, weights, dtype=dtype, device=device, native=native, max_rows=max_rows)

    @property
    def image_rule(self) -> TiledImageRule:
        return TiledImageRule(self)

    @property
    def video_rule(self) -> None:
        """None: the family takes no videos."""
        return None

    def limited(self, *, max_model_len: int, video_pruning_rate: float | None = None) -> TiledVision:
        if video_pruning_rate:
            raise ValueError(f"video_pruning_rate {video_pruning_rate:g}: this model takes no videos; 0 would work")
        return replace(self, max_model_len=max_model_len)

    def positions(self, ids: Sequence[int], blocks: Sequence[tuple[int, Grid]]) -> Positions | None:
        """None: image tokens take one position each, like text."""
        return None

    def describe_preprocessing(self) -> str:
        image = self.image
        mean, std = (" ".join(f"{v:g}" for v in values) for values in (image.mean, image.std))
        tiles = (
            f"{image.min_tiles} to {image.max_tiles} tiles of {image.tile_size} pixels "
            f"{'and' if image.use_thumbnail else 'without'} the whole image "
            f"above {image.max_pixels_tolerance:g} times that"
        )
        return (
            f"patch {self.patch_size}, merge {self.merge_size}, images of {image.min_image_tokens} to "
            f"{image.max_image_tokens} tokens, {tiles if image.most_tiles else 'no tiles'}, "
            f"mean {mean}, deviation {std}"
        )
