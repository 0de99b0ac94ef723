"""The family's `VisionSpec`: image and video rules, with `nemotron_h_omni`'s tower."""

from __future__ import annotations

from families.nemotron_h_nano_vl.image_rule import TiledImageRule
from families.nemotron_h_nano_vl.video_rule import FrameVideoRule
from families.nemotron_h_nano_vl.vision_config import TiledConfig
from families.nemotron_h_omni.vision import RadioSpec, numbers


class TiledVision(TiledConfig, RadioSpec):
    """Implements `families.family.VisionSpec`."""

    @property
    def image_rule(self) -> TiledImageRule:
        return TiledImageRule(self)

    @property
    def video_rule(self) -> FrameVideoRule:
        return FrameVideoRule(self)

    def describe_preprocessing(self) -> str:
        return (
            f"patch {self.patch_size}, merge {self.merge_size}, up to {self.max_tiles} tiles of {self.tile_size} "
            f"pixels {'and' if self.use_thumbnail else 'without'} the whole image, mean {numbers(self.image_mean)}, "
            f"deviation {numbers(self.image_std)}"
        )
