"""Checks of images and of the frames of clips, which the rules of families share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from encoder.media_limits import RGB

if TYPE_CHECKING:
    import torch


def check_pixels(image_HWC: torch.Tensor, of: str = "") -> None:
    """Raises `ValueError`, beginning with `of`, unless the tensor is `[H, W, 3]` uint8."""
    import torch  # imported here: grids and token counts need no torch

    if image_HWC.dim() != 3 or image_HWC.shape[2] != RGB or image_HWC.dtype != torch.uint8:
        raise ValueError(f"{of}expected [H, W, 3] uint8 pixels, got {tuple(image_HWC.shape)} {image_HWC.dtype}")


def check_tokens(tokens: int, limit: int | None) -> None:
    """Raises `ValueError`, with both numbers, for more tokens than the context has; `limit` None: it is not known."""
    if limit is not None and tokens > limit:
        raise ValueError(f"it takes {tokens} tokens and the context holds {limit}")


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
    first: tuple[int, ...] = ()
    index = -1
    for index, frame_HWC in enumerate(frames):
        check_pixels(frame_HWC, f"frame {index}: ")
        shape = tuple(frame_HWC.shape)
        first = first or shape
        if shape != first:
            raise ValueError(f"frame {index} has {shape[0]}x{shape[1]} pixels, the first {first[0]}x{first[1]}")
        if index >= num_frames:
            raise ValueError(f"frame {index} is one too many for a clip of {num_frames} frames")
        yield frame_HWC
    if index + 1 != num_frames:
        raise ValueError(f"got only {index + 1} frames of a clip of {num_frames}")
