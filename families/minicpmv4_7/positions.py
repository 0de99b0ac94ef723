"""Positions of prompts with images: three axes, time, height and width, on which an image and its slices share a canvas
(transformers' `MiniCPMV4_7Model.get_rope_index`).

All rows of an image have the same time. Slices lie next to each other as they were cut, and the whole image is
stretched over them, so that rows of the same place have about the same position. Markers lie at the corners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from decoder.positions import Positions
from encoder.item import Grid

if TYPE_CHECKING:
    from torch import Tensor

AXES = 3


class Markers(NamedTuple):
    """Ids of the tokens around images and slices."""

    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    newline: int
    """Between rows of slices."""


class Crop(NamedTuple):
    """A whole image, or one slice: its rows are the prompt's tokens `[start, end)`."""

    start: int
    rows: int
    columns: int
    """`rows` and `columns` of image tokens."""

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


@dataclass
class _Image:
    """An image or a frame of a video."""

    whole: Crop
    slices: list[Crop] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """Slices in a row: the first that is followed by more than the two markers between slices ends a row."""
        for index, (crop, after) in enumerate(zip(self.slices, self.slices[1:]), 1):
            if after.start - crop.end > 2:
                return index if len(self.slices) % index == 0 else len(self.slices)
        return len(self.slices)

    @property
    def canvas(self) -> tuple[int, int]:
        """Height and width of the canvas, in image tokens."""
        if not self.slices:
            return self.whole.rows, self.whole.columns
        first = self.slices[0]
        return len(self.slices) // self.columns * first.rows, self.columns * first.columns


def canvas_positions(
    ids: Sequence[int], blocks: Sequence[tuple[int, Grid]], markers: Markers, *, merge_size: int
) -> Positions:
    """Positions of the prompt `ids`. `blocks`: the first row and the patch grid of each image and slice, ascending.
    Raises `ValueError` for blocks that overlap, lie outside the prompt, or do not follow a marker.

    Text has the next position on all axes. After an image, text continues one past the canvas's longer side.
    """
    import torch  # imported here: a frontend process without images needs none

    found_L3 = torch.empty(len(ids), AXES, dtype=torch.int64)
    index = position = 0
    for image in _images(ids, blocks, markers, merge_size):
        begin = image.whole.start - 1
        if begin > index:
            found_L3[index:begin] = torch.arange(position, position + begin - index)[:, None]
            position += begin - index
        last = image.slices[-1] if image.slices else image.whole
        index = last.end
        while index < len(ids) and ids[index] in markers:
            index += 1
        _place(found_L3, image, begin, index, position)
        position += max(image.canvas) + 1
    found_L3[index:] = torch.arange(position, position + len(ids) - index)[:, None]
    delta = int(found_L3.max()) + 1 - len(ids)
    return Positions(tuple(map(tuple, found_L3.tolist())), delta)


def _images(ids: Sequence[int], blocks: Sequence[tuple[int, Grid]], markers: Markers, merge_size: int) -> list[_Image]:
    """The blocks as images with their slices."""
    found: list[_Image] = []
    index = 1  # a marker comes first
    for start, grid in blocks:
        crop = Crop(start, grid[0] // merge_size, grid[1] // merge_size)
        if not (index <= start and crop.end <= len(ids) and crop.rows * crop.columns > 0):
            size = f"{crop.rows}x{crop.columns}"
            raise ValueError(f"{size} image tokens at {start} do not lie in places {index} to {len(ids) - 1}")
        before = ids[start - 1]
        if before not in (markers.image_start, markers.slice_start):
            raise ValueError(
                f"the image tokens at {start} follow token {before}; they must follow that of <image>, "
                f"{markers.image_start}, or of <slice>, {markers.slice_start}"
            )
        if found and before == markers.slice_start:
            found[-1].slices.append(crop)
        else:
            found.append(_Image(crop))
        index = crop.end
    return found


def _place(found_L3: Tensor, image: _Image, begin: int, end: int, origin: int) -> None:
    """Sets the positions of an image's tokens `[begin, end)`, markers included; `origin`: the canvas's first
    position."""
    whole, (height, width) = image.whole, image.canvas
    found_L3[begin:end] = origin
    found_L3[begin, 1:] = max(origin - 1, 0)  # <image>, just outside of the canvas
    _set(found_L3, whole.end, end, origin + height, origin + width)  # </image>, at the far corner
    _fill(found_L3, whole, origin, origin, height, width)
    for number, crop in enumerate(image.slices):
        row, column = divmod(number, image.columns)
        down, right = origin + row * image.slices[0].rows, origin + column * image.slices[0].columns
        found_L3[crop.start - 1, 1], found_L3[crop.start - 1, 2] = down, right
        _set(found_L3, crop.end, end, down + crop.rows - 1, right + crop.columns - 1)
        _fill(found_L3, crop, down, right, crop.rows, crop.columns)
    for number, (crop, after) in enumerate(zip(image.slices, image.slices[1:])):
        # A line feed lies beyond the right end of the row of slices that it ends.
        row = number // image.columns + 1
        for place in range(crop.end + 1, after.start - 1):
            _set(found_L3, place, end, origin + row * image.slices[0].rows - 1, origin + width)


def _set(found_L3: Tensor, place: int, end: int, down: int, right: int) -> None:
    if place < end:
        found_L3[place, 1], found_L3[place, 2] = down, right


def _fill(found_L3: Tensor, crop: Crop, down: int, right: int, height: int, width: int) -> None:
    """Spreads a crop's rows evenly over `height` x `width` places."""
    import torch

    block = found_L3[crop.start : crop.end].view(crop.rows, crop.columns, AXES)
    block[..., 1] = down + torch.linspace(0, height - 1, crop.rows).round().long()[:, None]
    block[..., 2] = right + torch.linspace(0, width - 1, crop.columns).round().long()
