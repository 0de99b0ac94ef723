"""Converts a decoded image to flattened patches: the released image processor's size rule, resize and normalisation.

Shapes: H, W pixels; C = 3 channels; p the patch side; m the merge size; T patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from encoder.item import BLOCK_MAJOR, EncoderItem, Grid, num_image_tokens
from encoder.media_limits import RGB
from encoder.stopwatch import Stopwatch
from families.frames import check_pixels, check_tokens
from families.qwen_media import MAX_ASPECT, QwenMedia
from families.tiles import fit_pixels

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QwenImageRule:
    """Implements `families.family.ImageRule` with the settings of `config`."""

    config: QwenMedia

    def grid(self, height: int, width: int) -> Grid:
        """The patch grid `(gh, gw)` of an image of `height` x `width` pixels."""
        config = self.config
        sides = smart_resize(height, width, config.factor, config.image.min_pixels, config.image.max_pixels)
        return sides[0] // config.patch_size, sides[1] // config.patch_size

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """Resizes and cuts one image, and normalises the patches. With `keep_bytes` they stay uint8, and the tower's
        `as_floats` normalises them to the same values.

        `image_HWC`: `[H, W, 3]` uint8, resized with Pillow's bicubic filter on bytes. Returns new memory. Raises
        `ValueError` for another shape or dtype, and for an image of more tokens than the context has.
        """

        check_pixels(image_HWC)
        config = self.config
        grid = self.grid(image_HWC.shape[0], image_HWC.shape[1])
        check_tokens(num_image_tokens(grid, merge_size=config.merge_size), config.max_model_len)
        watch = watch or Stopwatch()
        with watch("resize"):
            resized_HWC = resize_bytes(image_HWC, (grid[0] * config.patch_size, grid[1] * config.patch_size))
        with watch("patch"):
            patches = cut_blocks(resized_HWC, config.patch_size, config.merge_size)
            if not keep_bytes:
                patches = normalised(patches, config.image.mean, config.image.std).to(dtype)
        return EncoderItem(grid, patches, merge_size=config.merge_size, order=BLOCK_MAJOR)


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width that an image is resized to: multiples of `factor` near its aspect ratio, with `min_pixels` to
    `max_pixels` in total. A very flat image keeps a side of `factor` and may exceed `max_pixels`.

    Raises `ValueError` for sizes that are not positive, and where one side is more than 200 times the other.
    """
    check_shape(height, width)
    # Python's round, half to even, is part of the rule.
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    return fit_pixels((1, height, width), (1, rows, columns), factor, min_pixels, max_pixels)


def check_shape(height: int, width: int) -> None:
    """Raises `ValueError` for an image or frame that is empty or too flat."""
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least one pixel each way, got {height}x{width}")
    if max(height, width) / min(height, width) > MAX_ASPECT:
        aspect = max(height, width) / min(height, width)
        raise ValueError(f"{height}x{width} pixels are {aspect:.0f} to 1; at most {MAX_ASPECT} to 1 is possible")


def resize_bytes(image_HWC: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """`[*size, 3]` uint8, resized by Pillow; the argument itself if it has that size."""
    import torch
    from PIL import Image

    if tuple(image_HWC.shape[:2]) == size:
        return image_HWC
    image = Image.fromarray(image_HWC.contiguous().numpy())
    resized = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    # frombuffer of a copy: Pillow's own array is read-only, and torch would warn
    return torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).view(*size, RGB)


def cut_blocks(pixels_HWC: torch.Tensor, patch_size: int, merge: int) -> torch.Tensor:
    """`[H, W, 3]` -> `[T, 3 * p * p]` of the same dtype in new memory: image tokens row by row, with the m x m patches
    of each next to each other; channels are outermost inside a patch."""
    import torch

    height, width, channels = pixels_HWC.shape
    side = patch_size * merge
    cut = pixels_HWC.reshape(height // side, merge, patch_size, width // side, merge, patch_size, channels)
    # numpy copies bytes in this order in half the time
    blocks = cut.numpy().transpose(0, 3, 1, 4, 6, 2, 5).copy()
    return torch.from_numpy(blocks).view(-1, channels * patch_size**2)


def normalised(patches_TP: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Normalises uint8 patches `[T, 3 * n]`, channels outermost, to float32 on their device; new memory.

    The released processor multiplies by 1/255 in float64 and rounds to float32; for every byte, the division here gives
    the same value.
    """
    import torch

    planes_TCN = patches_TP.view(patches_TP.shape[0], RGB, -1).to(torch.float32).div_(255.0)
    mean_C1, std_C1 = (torch.tensor(values, device=patches_TP.device)[:, None] for values in (mean, std))
    return planes_TCN.sub_(mean_C1).div_(std_C1).view(patches_TP.shape)
