"""The interface between a model family and the rest of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

from decoder.config import DecoderConfig
from decoder.positions import Positions
from encoder.item import EncoderItem, Grid, ItemLayout
from encoder.stopwatch import Stopwatch
from encoder.tower import TowerSpec
from families.tool_calls import ToolMarkup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelFiles:
    """The JSON files of one model directory; an absent file is an empty mapping."""

    path: Path
    config: Mapping[str, Any]
    """`config.json`."""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the image processor: `preprocessor_config.json`, or its section of `processor_config.json`."""
    video_preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the video processor: its section of `processor_config.json`, else `video_preprocessor_config.json`,
    else `preprocessor_config.json`."""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """`processor_config.json`."""


class ImageRule(Protocol):
    """Converts an image to patches."""

    def grid(self, height: int, width: int) -> Grid:
        """The patch grid `(gh, gw)` of an image of `height` x `width` pixels. Raises ValueError for a size that has
        none."""

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """Converts `[H, W, 3]` uint8 pixels to an item with patches in `dtype`; new memory. With `keep_bytes` the
        patches may stay uint8 if that loses nothing. `watch` times the stages. Raises ValueError for an image that the
        tower cannot take."""


@runtime_checkable
class CutsSlices(Protocol):
    """Further properties of an image or video rule that may cut an image or frame into slices. An image of a rule that
    is no `SlicingRule` has one placeholder in a prompt, whatever the number of its slices."""

    @property
    def most_slices(self) -> int:
        """Largest number of slices of an image or frame."""

    @property
    def slices_first(self) -> bool:
        """Whether slices precede the whole image or frame (`ItemLayout.slices_first`)."""


@runtime_checkable
class SlicingRule(CutsSlices, Protocol):
    """Further method of an image rule that may cut an image into slices."""

    def text(self, item: ItemLayout, number: int, *, token: str) -> str:
        """The prompt's text for image `number` (counted from 0), which replaces the single `token` of the chat
        template: one `token` for each attention sequence of `item`, with the separators between them."""


class VideoRule(Protocol):
    """Converts frames of a clip to patches, and writes the clip's part of a prompt."""

    @property
    def pruning_rate(self) -> float:
        """Share of a clip's rows that is dropped after the tower."""

    def sample(self, total: int, count: int) -> list[int]:
        """Indices of at most `count` of `total` decoded frames, ascending. Raises ValueError unless both are
        positive."""

    def sample_file(self, total: int, count: int, fps: Callable[[], float | None]) -> list[int]:
        """Indices of at most `count` of the `total` frames of a file, ascending, at the model's sampling rate. A frame
        that is shown for long may come several times. `fps`: returns the file's frame rate, or None if unknown; it is
        only called if needed, since it may have to read the file."""

    def tokens(self, num_frames: int, height: int, width: int) -> int:
        """Rows that a clip will give the decoder; needs no decoded frame."""

    def most_numbers(self, num_frames: int) -> int:
        """Upper bound of the numbers in the patches of a clip of at most `num_frames` frames of any size with an aspect
        of at most `MAX_ASPECT` (encoder/media_limits.py)."""

    def patchify(
        self, frames: Iterable[torch.Tensor], dtype: torch.dtype, *, num_frames: int | None = None,
        keep_bytes: bool = False, watch: Stopwatch | None = None,
    ) -> EncoderItem:  # fmt: skip
        """Converts a clip to an item, like `ImageRule.patchify`. `frames`: `[H, W, 3]` uint8, all of one size; for a
        generator, `num_frames` says how many it yields. Raises ValueError naming the frame at fault."""

    def labels(self, num_frames: int, *, fps: float | None = None, indices: Sequence[int] | None = None) -> list[str]:
        """The text before each temporal patch; at least one, which may be empty. `fps`: the source's frame rate;
        `indices`: of the frames in the source."""

    def text(self, item: ItemLayout, labels: Sequence[str], number: int, *, start: str, token: str, end: str) -> str:
        """The prompt's text for clip `number` (counted from 0): for each temporal patch its label, and one `token` for
        each attention sequence between `start` and `end`, or between the family's own separators."""


class VisionSpec(TowerSpec, Protocol):
    """A family's vision part: the tower's sizes, how to build the tower, and the rules that make its input."""

    def not_compiled(self, dtype: torch.dtype, device: torch.device) -> str:
        """Why the tower has no compiled code for this dtype and device; empty if it has."""

    @property
    def image_rule(self) -> ImageRule:
        """Converts images to patches."""

    @property
    def video_rule(self) -> VideoRule | None:
        """Converts clips to patches; None if the tower takes no clips."""

    def limited(self, *, max_model_len: int, video_pruning_rate: float | None = None) -> VisionSpec:
        """This spec for a context of at most `max_model_len` tokens and, where given, with another pruning rate. Raises
        ValueError unless the rate is at least 0 and below 1."""

    def positions(self, ids: Sequence[int], blocks: Sequence[tuple[int, Grid]]) -> Positions | None:
        """Positions of the prompt `ids`; None if they are 0, 1, 2 and so on. `blocks`: the first row and the patch grid
        of each attention sequence, ascending. Raises ValueError for blocks that overlap, lie outside the prompt, or are
        not surrounded by the tokens that the model needs there."""

    def describe_preprocessing(self) -> str:
        """One line with all settings that affect the pixels of a patch: two hosts may exchange patches if it is
        equal."""


@dataclass(frozen=True)
class FamilyConfig:
    """Contents of a model directory, as a family reads it."""

    text: Mapping[str, Any] = field(compare=False)
    """The section of `config.json` about the decoder; the whole file for text-only models."""
    decoder: DecoderConfig
    vision: VisionSpec | None = None
    """None for text-only models."""
    image_token_id: int | None = None
    """Id of the placeholder that the prompt holds for each image; None for text-only models."""
    video_token_id: int | None = None
    """Id of the placeholder that the chat template writes for a clip and that each of its rows takes; None where clips
    are written as text with placeholders of images."""


class Target(NamedTuple):
    """One of our tensors, and how a stored tensor contributes to it."""

    name: str
    how: Literal["whole", "part", "stack", "joined"] = "whole"
    """`whole`: the stored tensor itself; `part`: one of `parts` equal parts of its rows (the second last dimension; of
    a vector, its elements); `stack`: one entry of a stack; `joined`: the rows follow those of the tensor before it."""
    place: int = 0
    """Index of the part, of the entry of the stack, or of the tensor among those that are joined."""
    parts: int = 1
    ranges: tuple[tuple[int, int], ...] = ()
    """(first, end) of neighbouring parts, in place of the one at `place`: those of the first range in every group, then
    those of the second, and so on."""
    groups: int = 1
    """Number of equal groups of rows, each of which contains all parts: for example one group per head."""
    offset: float = 0.0
    """Added to every element in float32, for norms that store their weight minus 1. Not for quantised matrices."""
    factor: float = 1.0
    """Every element is multiplied by this in float32, before `offset` is added. Not for quantised matrices."""
    shared: bool = False
    """Whether several parameters of the transformers class are one tensor. Files may have it under the names of some or
    all of them, of which the first is read; adapters, which are trained for each parameter, cannot change it."""

    @property
    def taken(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of the parts that are taken of each group."""
        return self.ranges or ((self.place, self.place + 1),)

    @property
    def num_taken(self) -> int:
        """Number of the parts that are taken of each group."""
        return sum(end - first for first, end in self.taken)


@dataclass(frozen=True)
class Family:
    """A model family; one folder of this package."""

    name: str
    """`model_type` in `config.json`."""
    read_config: Callable[[ModelFiles], FamilyConfig]
    """Reads a model directory. Raises CheckpointError naming the field at fault."""
    weights: Callable[[FamilyConfig], Callable[[str], list[Target]]]
    """Maps a stored tensor's name to our names; to an empty list for parts of the model that are not used."""
    aliases: tuple[str, ...] = ()
    """Further values of `model_type`, and names of architectures, in released files."""
    image_wrappers: tuple[str, str] | None = None
    """Tokens that the released processor writes before and after the placeholders of an image."""
    reasoning: tuple[str, str] | None = None
    """Tokens that open and close the model's reasoning, which is the first part of its output."""
    tool_markups: tuple[ToolMarkup, ...] = ()
    """How models of the family write tool calls. The first one whose sign is in the chat template is used."""

    def tool_markup(self, template: str) -> ToolMarkup | None:
        """How a model with this chat template writes tool calls; None if it is not known."""
        return next((markup for markup in self.tool_markups if markup.sign in template), None)
