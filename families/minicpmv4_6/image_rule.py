"""Converts a decoded image to flattened patches: the whole image and slices of large ones, cut like the released
processor.

Shapes: H, W pixels; C = 3 channels; p the patch side; T patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import EncoderItem, Grid, ItemLayout
from encoder.media_limits import RGB
from encoder.stopwatch import Stopwatch
from families.frames import check_pixels, check_tokens
from families.minicpmv4_6.slicing import Part
from families.minicpmv4_6.vision_config import VisionConfig
from families.qwen_images import normalised, resize_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SlicedImageRule:
    """Implements `families.family.ImageRule` and `SlicingRule` with the settings of `config`."""

    config: VisionConfig
    slices_first = False

    @property
    def most_slices(self) -> int:
        return self.config.image.most_slices

    def grid(self, height: int, width: int) -> Grid:
        """The patch grid of the whole image (without slices) for an image of `height` x `width` pixels."""
        return part_grid(self.config.image.parts(height, width, self.config.factor)[0], self.config)

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """Resizes and cuts one image and its slices, and normalises the patches. With `keep_bytes` they stay uint8, and
        the tower's `as_floats` normalises them to the same values.

        `image_HWC`: `[H, W, 3]` uint8, resized with Pillow's bicubic filter on bytes. Returns new memory. Raises
        `ValueError` for another shape or dtype, and for an image of more tokens than the context has.
        """
        import torch  # imported here: grids and token counts need no torch

        check_pixels(image_HWC)
        config, watch = self.config, watch or Stopwatch()
        parts = config.image.parts(image_HWC.shape[0], image_HWC.shape[1], config.factor)
        check_parts(config, parts)
        patches = []
        for part in parts:
            with watch("resize"):
                resized_HWC = resize_bytes(image_HWC, resized_size(part))
            with watch("patch"):
                patches.append(cut_part(resized_HWC, part, config.patch_size))
        with watch("patch"):
            joined = torch.cat(patches)
            if not keep_bytes:
                joined = normalised(joined, config.image.mean, config.image.std).to(dtype)
        slices, slice_grid = slices_of(parts, config)
        return EncoderItem(
            part_grid(parts[0], config), joined, num_sequences=1 + slices[0] * slices[1], slices=slices,
            slice_grid=slice_grid, merge_size=config.merge_size,
        )  # fmt: skip

    def text(self, item: ItemLayout, number: int, *, token: str) -> str:
        """The image's part of the prompt: its number, the whole image, and its slices row by row."""
        return numbered(number, self.config) + sliced_text(item, token)


def part_grid(part: Part, config: VisionConfig) -> Grid:
    """The patch grid of the whole image, or of each slice."""
    return part.height // config.patch_size, part.width // config.patch_size


def slices_of(parts: Sequence[Part], config: VisionConfig) -> tuple[Grid, Grid]:
    """Rows and columns of slices, and the patch grid of each; zeros for an image without slices."""
    return (parts[1].cut, part_grid(parts[1], config)) if len(parts) > 1 else ((0, 0), (0, 0))


def resized_size(part: Part) -> tuple[int, int]:
    """Height and width to which the image is resized before this part is cut from it."""
    return part.height * part.cut[0], part.width * part.cut[1]


def cut_part(resized_HWC: torch.Tensor, part: Part, patch_size: int) -> torch.Tensor:
    """`[T, 3 * p * p]` uint8: slice after slice, each row by row."""
    import torch

    from encoder.preprocess import cut_patches

    down, across = part.cut
    cut = resized_HWC.reshape(down, part.height, across, part.width, RGB).permute(0, 2, 4, 1, 3).flatten(0, 1)
    return torch.cat([cut_patches(slice_CHW, patch_size, torch.uint8) for slice_CHW in cut])


def check_parts(config: VisionConfig, parts: Sequence[Part], *, frames: int = 1) -> None:
    """Raises `ValueError`, with both numbers, if `frames` images of these parts have more tokens than the context."""
    check_tokens(frames * sum(part.pixels for part in parts) // config.factor**2, config.max_model_len)


def numbered(number: int, config: VisionConfig) -> str:
    """The number of an image or video in the prompt, counted from 0; empty for models without."""
    return f"<image_id>{number}</image_id>" if config.use_image_id else ""


def sliced_text(item: ItemLayout, token: str) -> str:
    """An image, or a frame of a video: the whole image, then its slices row by row."""
    row = f"<slice>{token}</slice>" * item.slices[1]
    return f"<image>{token}</image>" + "\n".join([row] * item.slices[0])
