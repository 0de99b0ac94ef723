"""The encoder's input: an image or a clip as attention sequences of patches.

Code that uses items never asks whether one is an image or a clip. An item says which of the tower's inputs takes its
patches, how they divide into sequences, and how many rows the decoder gets for it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Grid = tuple[int, int]
"""Rows and columns of patches."""
IMAGE, VIDEO = "image", "video"
"""The tower's inputs: patches of one image, and patches that span several frames of a clip."""
ROW_MAJOR, BLOCK_MAJOR = "rows", "blocks"
"""Orders of the patches of a sequence: row by row; or grouped by image token, tokens row by row."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "uint8": 1}
"""Bytes per value for each dtype that patches may have, by torch's name."""


def num_image_tokens(grid: Grid, *, merge_size: int = 2) -> int:
    """Image tokens of a patch grid: one per `merge_size` x `merge_size` patches. Raises `ValueError` if it does not
    divide the grid."""
    rows, columns = grid
    if rows < 1 or columns < 1 or rows % merge_size or columns % merge_size:
        raise ValueError(f"a grid of {rows}x{columns} patches: both sides must be multiples of merge_size {merge_size}")
    return rows * columns // merge_size**2


def check_rate(rate: float) -> None:
    """Raises `ValueError` unless `0 <= rate < 1`."""
    if not 0 <= rate < 1:
        raise ValueError(f"a video pruning rate must be at least 0 and below 1, got {rate}")


def retained_tokens(sequences: int, tokens: int, rate: float) -> int:
    """Rows that remain of `sequences` temporal patches of `tokens` rows each: at least `tokens`."""
    check_rate(rate)
    if sequences < 1 or tokens < 1:
        raise ValueError(f"{sequences} temporal patches of {tokens} tokens: both must be positive")
    import numpy as np  # imported here: a frontend process without videos needs none

    # In float32, like the reference implementation: in float64, a share of 0.2 of 15 rows would be 2 instead of 3.
    return max(tokens, int(np.float32(sequences * tokens) * np.float32(1 - rate))) if rate else sequences * tokens


@dataclass(frozen=True)
class PatchSequence:
    """One attention sequence: its patches `[gh * gw, width]`, in `order`."""

    grid: Grid
    patches: torch.Tensor
    merge_size: int = 2
    order: str = ROW_MAJOR

    @cached_property
    def tokens(self) -> int:
        """Rows that the tower outputs for it."""
        return num_image_tokens(self.grid, merge_size=self.merge_size)


@dataclass(frozen=True)
class ItemLayout:
    """How an item divides into attention sequences, and how many rows it gives. Raises `ValueError` for impossible
    sizes."""

    grid: Grid
    """Patch grid of every sequence that is not a slice; (0, 0) if all of them are slices."""
    _: KW_ONLY
    kind: str = IMAGE
    """Which of the tower's inputs takes the patches."""
    num_sequences: int = 1
    """Attention sequences: for an image one per slice and, unless `grid` is (0, 0), one for the whole image; for a clip
    one per temporal patch or, if its frames are cut into slices, as many per frame as an image has."""
    slices: Grid = (0, 0)
    """Rows and columns of slices into which an image, or each frame, was cut. Slices are in order, row by row."""
    slice_grid: Grid = (0, 0)
    """Patch grid of each slice."""
    slices_first: bool = False
    """Whether the slices precede the whole image, or frame, instead of following it."""
    num_frames: int = 0
    """Frames of a clip before padding; 0 for an image."""
    pruning_rate: float = 0.0
    """Share of the rows that is dropped after the tower."""
    merge_size: int = 2
    """Patches per row of the output along each side."""
    order: str = ROW_MAJOR
    """Order of the patches inside a sequence: `ROW_MAJOR` or `BLOCK_MAJOR`."""

    def __post_init__(self) -> None:
        check_rate(self.pruning_rate)
        if self.order not in (ROW_MAJOR, BLOCK_MAJOR):
            raise ValueError(f"patches in order {self.order!r}; known are {ROW_MAJOR!r} and {BLOCK_MAJOR!r}")
        if self.num_sequences < 1 or self.merge_size < 1:
            raise ValueError(f"{self.num_sequences} sequences, merge_size {self.merge_size}: both must be positive")
        if self.num_slices or self.slice_grid != (0, 0) or self.slices_first:
            self._check_slices()

    def _check_slices(self) -> None:
        if min(*self.slices, *self.slice_grid) < 1:
            raise ValueError(f"{self.slices} slices of {self.slice_grid} patches: all must be positive")
        if min(self.grid) < 1 and self.grid != (0, 0):
            raise ValueError(f"a grid of {self.grid} patches: both sides must be positive, or both 0 for slices alone")
        each = self.num_slices + self._has_whole
        if self.num_sequences != max(self.num_frames, 1) * each or self.num_frames < 0 or self.pruning_rate:
            raise ValueError(
                f"{self.num_sequences} sequences, {self.num_frames} frames and pruning rate {self.pruning_rate}: with "
                f"{self.num_slices} slices there are {each} sequences for an image or frame, and the rate is 0"
            )

    @property
    def num_slices(self) -> int:
        """Number of slices of the image, or of each frame; 0 if there are none."""
        return self.slices[0] * self.slices[1]

    @property
    def num_groups(self) -> int:
        """Groups of a whole and its slices: 1 for an image; for a clip as many as it has temporal patches or, with
        slices, frames."""
        return self.num_sequences // (self.num_slices + self._has_whole)

    @property
    def _has_whole(self) -> bool:
        """Whether a whole image, frame or temporal patch has a sequence."""
        return not self.num_slices or self.grid != (0, 0)

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """Patch grid of each sequence."""
        return self._of_each(self.grid, self.slice_grid) * self.num_groups

    def _of_each(self, whole: T, slice: T) -> tuple[T, ...]:
        """The values of the sequences of one group, in order."""
        wholes, slices = (whole,) * self._has_whole, (slice,) * self.num_slices
        return slices + wholes if self.slices_first else wholes + slices

    @property
    def num_patches(self) -> int:
        """Patches of all sequences together."""
        slices = self.num_slices * self.slice_grid[0] * self.slice_grid[1]
        return self.num_groups * (self.grid[0] * self.grid[1] + slices)

    @cached_property
    def sequence_tokens(self) -> tuple[int, ...]:
        """Rows that the tower outputs for each sequence, before pruning. Raises `ValueError` if `merge_size` does not
        divide a grid."""
        return self._of_each(*self._tokens_of_each) * self.num_groups

    @cached_property
    def tokens(self) -> int:
        """Rows that the decoder gets, known before the tower has run. Raises `ValueError` if `merge_size` does not
        divide a grid."""
        whole, each = self._tokens_of_each
        if self.num_slices:
            return self.num_groups * (whole + self.num_slices * each)
        return retained_tokens(self.num_sequences, whole, self.pruning_rate)

    @property
    def _tokens_of_each(self) -> tuple[int, int]:
        """Rows of a whole image, frame or temporal patch, and of a slice; 0 for what has no sequence."""
        whole = num_image_tokens(self.grid, merge_size=self.merge_size) if self._has_whole else 0
        return whole, num_image_tokens(self.slice_grid, merge_size=self.merge_size) if self.num_slices else 0


@dataclass(frozen=True)
class ItemDescription(ItemLayout):
    """An item without its patches, as sent between processes and hosts; the patches follow as bytes."""

    width: int
    """Values in one patch."""
    dtype: str
    """Dtype of the patches: a key of `DTYPE_BYTES`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"pixels of type {self.dtype!r}; known are {', '.join(DTYPE_BYTES)}")

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the patches."""
        return self.num_patches, self.width

    @property
    def nbytes(self) -> int:
        """Bytes of the patches."""
        return self.num_patches * self.width * DTYPE_BYTES[self.dtype]

    def with_patches(self, patches: torch.Tensor) -> EncoderItem:
        """The item with `patches`. Raises `ValueError` unless they have `shape` and `dtype`."""
        item = EncoderItem(patches=patches, **_layout(self))
        if item.description != self:
            given = f"{list(patches.shape)} {patches.dtype}"
            raise ValueError(f"patches are {given}, but the description says {list(self.shape)} {self.dtype}")
        return item


@dataclass(frozen=True)
class EncoderItem(ItemLayout):
    """One image or clip with its patches. Raises `ValueError` if the patches do not fit the sequences."""

    patches: torch.Tensor
    """`[num_patches, width]`: sequence after sequence, each in `order`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = self.num_patches
        if self.patches.dim() != 2 or self.patches.shape[0] != rows:
            shape = tuple(self.patches.shape)
            rows, columns = self.grid
            raise ValueError(
                f"a grid of {rows}x{columns} needs {rows * columns} rows of patches for each of "
                f"{self.num_groups} sequences{self._slices_named}, got shape {shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the patches."""
        return self.patches.nbytes

    @property
    def description(self) -> ItemDescription:
        """The item's description, without patches."""
        dtype = str(self.patches.dtype).removeprefix("torch.")
        return ItemDescription(width=self.patches.shape[1], dtype=dtype, **_layout(self))

    @property
    def sequences(self) -> list[PatchSequence]:
        """The attention sequences, as views of the patches."""
        parts = self.patches.split([rows * columns for rows, columns in self.grids])
        return [
            PatchSequence(grid, patches, self.merge_size, self.order)
            for grid, patches in zip(self.grids, parts, strict=True)
        ]

    @property
    def _slices_named(self) -> str:
        if not self.num_slices:
            return ""
        rows, columns = self.slice_grid
        slices = self.num_groups * self.num_slices
        return f", and {rows * columns} for each of {slices} slices of {rows}x{columns}"


def _layout(item: ItemLayout) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(ItemLayout)}
