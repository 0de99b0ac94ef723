"""Sizes of an image or video frame and of its slices, computed like the released processors do. Heights and widths are
in pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from encoder.item import Grid
from encoder.media_limits import MAX_ASPECT, RGB

LARGEST_SIDE = 2**14
"""Largest `scale_resolution` that is served."""


class Part(NamedTuple):
    """The whole image, or its slices."""

    height: int
    """Of the whole image, or of each slice."""
    width: int
    cut: Grid
    """Rows and columns of slices; (1, 1) for the whole image."""

    @property
    def pixels(self) -> int:
        """Pixels of all slices together."""
        return self.cut[0] * self.cut[1] * self.height * self.width


@dataclass(frozen=True)
class Slicing:
    """Settings of an image or video processor. Raises `ValueError` naming a field with an impossible value."""

    max_slice_nums: int = 9
    scale_resolution: int = 448
    """The whole image and each slice are resized to about the area of a square with this side, in pixels."""
    slice_mode: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    """`mean` and standard deviation per channel, of pixels scaled to 0..1."""

    def __post_init__(self) -> None:
        for name in ("max_slice_nums", "scale_resolution"):
            if getattr(self, name) < 1:
                raise ValueError(f"vision {name} must be at least 1, got {getattr(self, name)}")
        if len(self.mean) != RGB or len(self.std) != RGB or min(self.std) <= 0:
            raise ValueError(f"image_mean {self.mean} and image_std {self.std} need {RGB} numbers, image_std above 0")

    @property
    def most_slices(self) -> int:
        """Largest number of slices; 0 if images are not cut."""
        return self.max_slice_nums if self.slice_mode and self.max_slice_nums > 1 else 0

    def slices(self, height: int, width: int) -> Grid:
        """Rows and columns of slices of an image of `height` x `width` pixels; (0, 0) if it is not sliced."""
        if not self.slice_mode:
            return 0, 0
        return best_slices(height, width, self.max_slice_nums, self.scale_resolution) or (0, 0)

    def parts(self, height: int, width: int, factor: int) -> list[Part]:
        """The whole image, then its slices if it has any. `factor`: side of an image token. An image that is not sliced
        may be enlarged. Raises `ValueError` for an empty image."""
        rows, columns = self.slices(height, width)
        parts = [Part(*self._resized(height, width, factor, may_grow=not rows), (1, 1))]
        if rows:
            each = to_multiple(height, rows) / rows, to_multiple(width, columns) / columns
            parts.append(Part(*self._resized(*each, factor, may_grow=True), (rows, columns)))
        return parts

    def least_tokens(self, factor: int) -> int:
        """Tokens of the smallest image: one without slices, and of the aspect at which rounding takes most away.

        Such an image is resized to sides h and h * aspect, rounded down, where h is `scale_resolution` / sqrt(aspect),
        rounded down; so the least width for each h is that of the aspect at which h + 1 begins."""
        side, flattest = self.scale_resolution, math.sqrt(MAX_ASPECT)

        def tokens(length: int) -> int:
            return max(round(length / factor), 1)

        heights = range(int(side / flattest), int(side * flattest) + 1)
        return min(tokens(height) * tokens(height * side**2 // (height + 1) ** 2) for height in heights)

    def most_pixels(self, factor: int) -> int:
        """Upper bound of the pixels of all parts of an image with an aspect of at most `MAX_ASPECT`."""
        # Rounding adds half a token to a side, or makes a short side a whole token: most to the flattest image.
        short, long = self.scale_resolution / math.sqrt(MAX_ASPECT), self.scale_resolution * math.sqrt(MAX_ASPECT)
        each = max(short + factor / 2, factor) * max(long + factor / 2, factor)
        return math.ceil(each) * (1 + self.most_slices)

    def _resized(self, height: float, width: float, factor: int, *, may_grow: bool) -> tuple[int, int]:
        if height < 1 or width < 1:
            raise ValueError(f"an image needs at least one pixel each way, got {height:g}x{width:g}")
        if height * width > self.scale_resolution**2 or may_grow:
            aspect = width / height
            height = int(self.scale_resolution / math.sqrt(aspect))
            width = int(height * aspect)
        return to_multiple(height, factor), to_multiple(width, factor)


def best_slices(height: int, width: int, most: int, resolution: int) -> Grid | None:
    """Rows and columns of slices; None for an image that needs no slices.

    n is the image's area divided by `resolution` squared, rounded up, and at most `most`. Of the grids of n - 1, n or
    n + 1 slices, but at most `most`, the result is the one nearest to the image's aspect ratio. Raises `ValueError` for
    an empty image.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least one pixel each way, got {height}x{width}")
    wanted = min(math.ceil(width * height / resolution**2), most)
    if wanted <= 1:
        return None
    shape = math.log(width / height)
    best, least = (1, 1), math.inf
    for count in (wanted - 1, wanted, wanted + 1):
        if count == 1 or count > most:
            continue
        for rows in range(1, count + 1):
            if count % rows:
                continue
            error = abs(shape - math.log(count // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, count // rows), error
    return best


def to_multiple(length: float, divisor: int) -> int:
    """`length` rounded to the nearest multiple of `divisor`, but at least `divisor`. Rounding half to even is part of
    the rule."""
    return max(round(length / divisor) * divisor, divisor)
