"""From a decoded picture to flattened patches: the released image processor's grid rule, resize and normalisation.

Shapes: H, W pixels; C = 3 channels; p the patch side; gh, gw the patch grid; T = gh * gw patches.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from encoder.config import RGB, VisionConfig
from encoder.item import EncoderItem


@dataclass
class Stopwatch:
    """Seconds that each stage of making patches took."""

    seconds: Counter[str] = field(default_factory=Counter)
    frames: int = 0
    """Of clips."""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start  # type: ignore[assignment]


def target_grid(
    height: int, width: int, *, patch_size: int, min_patches: int, max_patches: int, merge_size: int = 2
) -> tuple[int, int]:
    """The patch grid `(gh, gw)` that a picture of `height` x `width` pixels is resized to.

    The rule of the released processor: about one patch per `patch_size` pixels, shrunk to at most `max_patches`, grown
    to at least `min_patches`, both sides made multiples of `merge_size`. Rounding a side of 1 up to `merge_size` may
    leave a very flat picture above `max_patches`, as it does there.

    Raises `ValueError` if a size is not positive or the shape is so flat that the rule gives it no rows at all.
    """
    if height < 1 or width < 1:
        raise ValueError(f"a picture needs at least one pixel each way, got {height}x{width}")
    if patch_size < 1 or min_patches < 1 or max_patches < 1:
        numbers = f"patch_size {patch_size}, min_patches {min_patches}, max_patches {max_patches}"
        raise ValueError(f"{numbers}: all must be positive")
    # Python's round (half to even) is part of the rule: 224 / 16 + 0.5 = 14.5 -> 14, but 15.5 -> 16.
    rows = round(height / patch_size + 0.5)
    columns = round(width / patch_size + 0.5)
    shrink = min(math.sqrt(max_patches / (rows * columns)), 1.0)
    rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
    if rows == 0 or columns == 0:
        raise ValueError(
            f"a picture of {height}x{width} pixels is too flat for a grid of at most {max_patches} patches"
        )
    if max_patches > min_patches and rows * columns < min_patches:
        grow = math.sqrt(min_patches / (rows * columns))
        rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
    rows = _to_multiple(rows, columns, merge_size, max_patches)
    columns = _to_multiple(columns, rows, merge_size, max_patches)
    return rows, columns


def _to_multiple(side: int, other: int, multiple: int, max_area: int) -> int:
    over = side % multiple
    if not over:
        return side
    up = side + multiple - over
    return up if up * other <= max_area else max(multiple, side - over)


def image_grid(height: int, width: int, config: VisionConfig, *, max_patches: int | None = None) -> tuple[int, int]:
    """`target_grid` with the numbers of `config`; `max_patches` lowers the budget of one picture."""
    return target_grid(
        height,
        width,
        patch_size=config.patch_size,
        min_patches=config.min_num_patches,
        max_patches=max_patches or config.patch_budget,
        merge_size=config.merge_size,
    )


def patchify(
    image_HWC: torch.Tensor, config: VisionConfig, dtype: torch.dtype, *, max_patches: int | None = None,
    keep_bytes: bool = False, watch: Stopwatch | None = None,
) -> EncoderItem:  # fmt: skip
    """Resize, normalise and cut one picture.

    `image_HWC`: `[H, W, 3]` uint8. The resize is bicubic with antialiasing in float32 on 0..255 and its overshoot is
    kept. Returns new memory, patches in `dtype`. Raises `ValueError` for another shape or dtype.
    `watch` counts the stages. `keep_bytes`: a picture that needs no resize is only cut, and its patches stay uint8 for
    `as_floats` to make the same numbers of: a quarter to half of the memory on their way.
    """
    if image_HWC.dim() != 3 or image_HWC.shape[2] != RGB or image_HWC.dtype != torch.uint8:
        raise ValueError(f"expected [H, W, 3] uint8 pixels, got {tuple(image_HWC.shape)} {image_HWC.dtype}")
    grid = image_grid(image_HWC.shape[0], image_HWC.shape[1], config, max_patches=max_patches)
    size = (grid[0] * config.patch_size, grid[1] * config.patch_size)
    watch = watch or Stopwatch()
    if keep_bytes and tuple(image_HWC.shape[:2]) == size:
        with watch("patch"):
            patches = cut_patches(image_HWC.permute(2, 0, 1), config.patch_size, torch.uint8)
        return EncoderItem(grid, patches, merge_size=config.merge_size)
    with watch("resize"):
        pixels_CHW = resize_pixels(image_HWC.permute(2, 0, 1)[None], size)[0]
    with watch("patch"):
        patches = cut_patches(normalise(pixels_CHW, config), config.patch_size, dtype)
    return EncoderItem(grid, patches, merge_size=config.merge_size)


def resize_pixels(pixels_NCHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """`[N, C, H, W]` uint8 -> float32 `[N, C, *size]` in 0..255, with the cubic's overshoot beyond that range kept."""
    pixels_NCHW = pixels_NCHW.to(torch.float32, memory_format=torch.contiguous_format)
    if tuple(pixels_NCHW.shape[-2:]) == size:
        return pixels_NCHW
    return F.interpolate(pixels_NCHW, size=size, mode="bicubic", align_corners=False, antialias=True)


def normalise(pixels_CHW: torch.Tensor, config: VisionConfig) -> torch.Tensor:
    """Float32 `[..., 3, H, W]` in 0..255 to the tower's scale: `(x / 255 - mean) / std` per channel."""
    mean = torch.tensor(config.image_mean, dtype=torch.float32).view(RGB, 1, 1) * 255.0
    std = torch.tensor(config.image_std, dtype=torch.float32).view(RGB, 1, 1) * 255.0
    return (pixels_CHW - mean) / std


def cut_patches(pixels_CHW: torch.Tensor, patch_size: int, dtype: torch.dtype) -> torch.Tensor:
    """`[C, H, W]` -> `[(H / p) * (W / p), C * p * p]` in `dtype`: row-major patches, channel by channel inside."""
    channels, height, width = pixels_CHW.shape
    rows, columns = height // patch_size, width // patch_size
    cut = pixels_CHW.to(dtype).reshape(channels, rows, patch_size, columns, patch_size).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, channels * patch_size**2)


def as_floats(patches: torch.Tensor, config: VisionConfig, dtype: torch.dtype) -> torch.Tensor:
    """Patches of pictures or clips in the tower's scale and `dtype`: uint8 ones normalised, others as they are.

    The numbers are those of normalising before cutting, since both work on each pixel alone.
    """
    if patches.dtype != torch.uint8:
        return patches.to(dtype)
    planes_NCP = patches.view(-1, RGB, config.patch_size**2).to(torch.float32)
    # Normalised as a picture of one column of pixels for each plane.
    return normalise(planes_NCP[..., None], config)[..., 0].to(dtype).view(patches.shape)
