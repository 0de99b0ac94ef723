"""Video clips to send, and transformers' own processor as the reference for their preparation."""

from __future__ import annotations

import io
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from transformers.models.nemotron_h_omni.processing_nemotron_h_omni import NemotronH_Omni_Reasoning_V3Processor
from transformers.models.nemotron_h_omni.video_processing_nemotron_h_omni import (
    NemotronH_Omni_Reasoning_V3VideoProcessor,
)

from families.nemotron_h_omni.vision import RadioVision

FPS = 4.0


def moving_frames(count: int, height: int, width: int, seed: int = 0) -> list[torch.Tensor]:
    """`[height, width, 3]` uint8 noise whose left half never moves."""
    generator = torch.Generator().manual_seed(seed)
    frames = [torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator) for _ in range(count)]
    for frame in frames[1:]:
        frame[:, : width // 2] = frames[0][:, : width // 2]
    return frames


def animation(frames: list[torch.Tensor], form: str) -> bytes:
    """The frames as a GIF, APNG ("PNG") or lossless WebP file at `FPS`."""
    images = [Image.fromarray(frame.numpy()) for frame in frames]
    buffer = io.BytesIO()
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    images[0].save(
        buffer, form, save_all=True, append_images=images[1:], duration=round(1000 / FPS), loop=0, **options
    )  # fmt: skip
    return buffer.getvalue()


def film(container: str, codec: str, frames: int = 10, height: int = 32, width: int = 48, ramp: int = 0) -> bytes:
    """A video whose frame i has a grey level of about 20 i at its left edge and `ramp` more at its right edge."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=Fraction(5))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            grey = np.full((height, width, 3), 20 * index, np.uint8)
            grey += (np.arange(width) * ramp // width).astype(np.uint8)[None, :, None]
            for packet in stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return buffer.getvalue()


def released_processor(config: RadioVision) -> Any:
    """transformers' own video processor with the settings of `config`."""
    made: Any = object.__new__(NemotronH_Omni_Reasoning_V3VideoProcessor)  # its constructor requires torchvision
    made.norm_mean, made.norm_std = list(config.image_mean), list(config.image_std)
    made.patch_size, made.downsample_ratio = config.patch_size, 1 / config.merge_size
    made.video_target_num_patches = config.video_target_num_patches
    made.video_maintain_aspect_ratio = config.video_maintain_aspect_ratio
    return made


def released_pixels(config: RadioVision, frames: list[torch.Tensor]) -> torch.Tensor:
    """`[F, C, H, W]`: the input of the model from the released processor."""
    return released_processor(config)._preprocess([torch.stack(frames).permute(0, 3, 1, 2)])["pixel_values_videos"]


def released_words(frames: int, *, tokens: int, fps: float | None, indices: list[int] | None = None) -> str:
    """The text that the released processor inserts for a clip of that many frames."""
    made: Any = object.__new__(NemotronH_Omni_Reasoning_V3Processor)
    made.image_start_token, made.image_token, made.image_end_token = "<img>", "<image>", "</img>"
    made.video_temporal_patch_dim = 2
    metadata = SimpleNamespace(fps=fps, frames_indices=indices)
    return str(made.replace_video_token({"num_tokens": [tokens]}, 0, num_frames=frames, video_metadata=metadata))
