"""Checks the frames of a clip, which video rules share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from encoder.media_limits import RGB

if TYPE_CHECKING:
    import torch


def checked_frames(frames: Iterable[torch.Tensor], num_frames: int | None) -> tuple[int, Iterator[torch.Tensor]]:
    """The number of frames, `num_frames` if that is given, and the frames. Raises `ValueError` if there is none.

    The iterator raises `ValueError` naming the first frame that is not `[H, W, 3]` uint8 of the first one's size, or
    both counts if they differ.
    """
    if num_frames is None:
        frames = list(frames)
        num_frames = len(frames)
    if num_frames < 1:
        raise ValueError(f"a clip needs at least 1 frame, got {num_frames}")
    return num_frames, _checked(frames, num_frames)


def _checked(frames: Iterable[torch.Tensor], num_frames: int) -> Iterator[torch.Tensor]:
    import torch  # imported here: grids and token counts need no torch

    first: tuple[int, ...] = ()
    index = -1
    for index, frame_HWC in enumerate(frames):
        shape = tuple(frame_HWC.shape)
        if len(shape) != 3 or shape[2] != RGB or frame_HWC.dtype != torch.uint8:
            raise ValueError(f"frame {index}: expected [H, W, 3] uint8 pixels, got {shape} {frame_HWC.dtype}")
        first = first or shape
        if shape != first:
            raise ValueError(f"frame {index} has {shape[0]}x{shape[1]} pixels, the first {first[0]}x{first[1]}")
        if index >= num_frames:
            raise ValueError(f"frame {index} is one too many for a clip of {num_frames} frames")
        yield frame_HWC
    if index + 1 != num_frames:
        raise ValueError(f"got only {index + 1} frames of a clip of {num_frames}")
