"""The family's `VisionSpec`: sizes, tower, image and video rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from decoder.positions import Positions
from encoder.item import Grid
from families.family import ModelFiles, Target
from families.files import checkpoint_errors
from families.qwen3_5.positions import prompt_positions
from families.qwen3_5.vision_config import VisionConfig, vision_fields
from families.qwen_images import QwenImageRule
from families.qwen_videos import QwenVideoRule

if TYPE_CHECKING:
    import torch

    from families.qwen3_5.tower import QwenTower
    from kernels.linear import AnyWeight


class QwenVision(VisionConfig):
    """Implements `families.family.VisionSpec`."""

    def build(
        self, weights: Iterable[tuple[str, AnyWeight]], *, dtype: torch.dtype, device: torch.device,
        native: str = "off", max_rows: int = 0,
    ) -> QwenTower:  # fmt: skip
        from families.qwen3_5.tower import QwenTower  # imported here: grids and token counts need no torch

        return QwenTower(self, weights, dtype=dtype, device=device, native=native, max_rows=max_rows)

    @property
    def image_rule(self) -> QwenImageRule:
        return QwenImageRule(self)

    @property
    def video_rule(self) -> QwenVideoRule:
        return QwenVideoRule(self)

    def positions(self, ids: Sequence[int], blocks: Sequence[tuple[int, Grid]]) -> Positions:
        return prompt_positions(len(ids), blocks, merge_size=self.merge_size)


def read_vision(vision: Mapping[str, Any], text_hidden_size: int, files: ModelFiles) -> QwenVision:
    """Reads `vision_config` of `config.json` and the processors' files. Raises CheckpointError naming the field."""
    fields = vision_fields(vision, text_hidden_size, files.preprocessor, files.video_preprocessor)
    with checkpoint_errors("vision_config"):
        return QwenVision(**fields)


def vision_targets(name: str) -> list[Target] | None:
    """The server's names for a stored tensor of the tower; None for other tensors."""
    name = name.removeprefix("model.")
    return [Target(name)] if name.startswith("visual.") else None
