"""Converts decoded pixels to flattened patches: the functions that image and video rules share.

Shapes: H, W pixels; C = 3 channels; p the patch side; T patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from encoder.media_limits import RGB


def resize_pixels(pixels_NCHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """`[N, C, H, W]` uint8 -> float32 `[N, C, *size]`, bicubic; overshoot beyond 0..255 is kept."""
    pixels_NCHW = pixels_NCHW.to(torch.float32, memory_format=torch.contiguous_format)
    if tuple(pixels_NCHW.shape[-2:]) == size:
        return pixels_NCHW
    return F.interpolate(pixels_NCHW, size=size, mode="bicubic", align_corners=False, antialias=True)


def resize_uint8(image_HWC: torch.Tensor, size: tuple[int, int], *, mode: str) -> torch.Tensor:
    """`[*size, 3]` uint8: resized by torch with antialiasing, on bytes, as torchvision does on most processors; the
    argument itself if it has that size. `mode`: `bilinear` or `bicubic`. It differs from Pillow by a level or two."""
    if tuple(image_HWC.shape[:2]) == size:
        return image_HWC
    pixels_NCHW = image_HWC.permute(2, 0, 1)[None]
    resized = F.interpolate(pixels_NCHW, size=size, mode=mode, align_corners=False, antialias=True)
    return resized[0].permute(1, 2, 0).contiguous()


def normalise(pixels_CHW: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Float32 `[..., 3, H, W]` in 0..255 -> `(x / 255 - mean) / std` per channel, on the same device."""
    mean_C11 = torch.tensor(mean, dtype=torch.float32, device=pixels_CHW.device).view(RGB, 1, 1) * 255.0
    std_C11 = torch.tensor(std, dtype=torch.float32, device=pixels_CHW.device).view(RGB, 1, 1) * 255.0
    return (pixels_CHW - mean_C11) / std_C11


def cut_patches(pixels_CHW: torch.Tensor, patch_size: int, dtype: torch.dtype) -> torch.Tensor:
    """`[C, H, W]` -> `[(H / p) * (W / p), C * p * p]` in `dtype`: patches row by row, channels outermost inside a
    patch."""
    channels, height, width = pixels_CHW.shape
    rows, columns = height // patch_size, width // patch_size
    cut = pixels_CHW.to(dtype).reshape(channels, rows, patch_size, columns, patch_size).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, channels * patch_size**2)


def as_floats(
    patches: torch.Tensor, patch_size: int, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> torch.Tensor:
    """Normalises uint8 patches, as `cut_patches` makes them or several concatenated, to `dtype`; patches of other
    dtypes are returned unchanged.

    Equal to normalising before cutting, since both work on each pixel alone.
    """
    if patches.dtype != torch.uint8:
        return patches.to(dtype)
    planes_NCP = patches.view(-1, RGB, patch_size**2).to(torch.float32)
    # Normalised as an image with one column of pixels per channel plane.
    return normalise(planes_NCP[..., None], mean, std)[..., 0].to(dtype).view(patches.shape)
