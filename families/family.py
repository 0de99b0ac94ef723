"""What a model family is to the rest of the server."""

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

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelFiles:
    """The JSON files of one model directory; empty mappings stand for files that are not there."""

    path: Path
    config: Mapping[str, Any]
    """`config.json`."""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """Of the image processor: `preprocessor_config.json`, or its part of `processor_config.json`."""
    video_preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """Of the video processor: `video_preprocessor_config.json`, or its part of `processor_config.json`."""


class ImageRule(Protocol):
    """How an image becomes patches."""

    def grid(self, height: int, width: int) -> Grid:
        """The patch grid of an image of that many pixels. Raises ValueError for a size that has none."""

    def patchify(
        self, image_HWC: torch.Tensor, dtype: torch.dtype, *, keep_bytes: bool = False, watch: Stopwatch | None = None
    ) -> EncoderItem:
        """`[H, W, 3]` uint8 pixels as an item in new memory, its patches in `dtype`; or in uint8, where `keep_bytes`
        allows it and no pixel changes. `watch` counts the stages. Raises ValueError for what the tower cannot take."""


@runtime_checkable
class SlicingRule(Protocol):
    """What an image rule that may cut an image into slices is in addition."""

    def text(self, item: ItemLayout, number: int, *, token: str) -> str:
        """What stands in a prompt for its image `number`, counted from 0, in the place of the one `token` of the chat
        template: as many tokens as `item` has attention sequences, and the words around them."""


class VideoRule(Protocol):
    """How frames of a clip become patches, and what stands between them in a prompt."""

    @property
    def pruning_rate(self) -> float:
        """Share of a clip's rows that are dropped after the tower."""

    def sample(self, total: int, count: int) -> list[int]:
        """Which of `total` frames to take for at most `count`, ascending. Both positive, else ValueError."""

    def sample_file(self, total: int, count: int, fps: Callable[[], float | None]) -> list[int]:
        """The same of a video whose frames nobody has chosen yet. `fps`: gives those of the source, or None where it
        does not say; asked only where it matters, since it may take reading the file."""

    def tokens(self, num_frames: int, height: int, width: int) -> int:
        """Rows that a clip gives the decoder, before anything is decoded."""

    def most_numbers(self, num_frames: int) -> int:
        """In the patches of a clip of so many frames, at most, whatever their size."""

    def patchify(
        self, frames: Iterable[torch.Tensor], dtype: torch.dtype, *, num_frames: int | None = None,
        keep_bytes: bool = False, watch: Stopwatch | None = None,
    ) -> EncoderItem:  # fmt: skip
        """As of an image. `frames`: `[H, W, 3]` uint8, all of one size; a generator says in `num_frames` how many it
        yields. Raises ValueError naming the frame at fault."""

    def labels(self, num_frames: int, *, fps: float | None = None, indices: Sequence[int] | None = None) -> list[str]:
        """The text before each attention sequence. `fps`: of the source; `indices`: of the frames there."""

    def text(self, labels: Sequence[str], rows: Sequence[int], *, start: str, token: str, end: str) -> str:
        """A clip in a prompt: for each attention sequence its label and `rows` times `token` between the wrappers."""


class VisionSpec(TowerSpec, Protocol):
    """A family's vision part: the tower's sizes, how it is made, and the rules that feed it."""

    @property
    def image_rule(self) -> ImageRule:
        """How images become patches."""

    @property
    def video_rule(self) -> VideoRule | None:
        """None for a tower that can take no clips."""

    def limited(self, *, max_model_len: int, video_pruning_rate: float | None = None) -> VisionSpec:
        """The same for a context of at most so many tokens, and with another pruning rate where one is given. Raises
        ValueError for a rate that is not at least 0 and below 1."""

    def positions(self, length: int, blocks: Sequence[tuple[int, Grid]]) -> Positions | None:
        """Of a prompt of `length` tokens, for decoders that read them; None where they simply count up. `blocks`: where
        the rows of each attention sequence begin, ascending, and its grid of patches. ValueError for blocks that do
        not lie in the prompt one after the other."""

    def describe_preprocessing(self) -> str:
        """What decides the pixels of a patch, in one line: equal on two hosts that may exchange patches."""


@dataclass(frozen=True)
class FamilyConfig:
    """What a family reads from a model directory."""

    text: Mapping[str, Any] = field(compare=False)
    """The section of `config.json` about the decoder; the whole file for text-only models."""
    decoder: DecoderConfig
    vision: VisionSpec | None = None
    """None for text-only models."""
    image_token_id: int | None = None
    """The placeholder that the prompt holds for each image; None for text-only models."""
    video_token_id: int | None = None
    """The placeholder that the chat template writes for a clip, and that stands for each of its rows; None where clips
    are written as text and have placeholders of images.
    """


class Target(NamedTuple):
    """One of our tensors that a stored tensor contributes to."""

    name: str
    how: Literal["whole", "part", "stack"] = "whole"
    """The stored tensor as it is, one of `parts` equal parts of its rows (the last dimension but one; of a vector, the
    numbers), or one entry of a stack.
    """
    place: int = 0
    """Which part, or which entry of the stack."""
    parts: int = 1
    groups: int = 1
    """The rows are so many equal groups, each of which has all parts: those of each head, where heads hold two."""
    offset: float = 0.0
    """Added to every number, in float32: what zero-centred norms leave out. Never of a matrix that is quantised."""


@dataclass(frozen=True)
class Family:
    """One folder of this package."""

    name: str
    """`model_type` in `config.json`."""
    read_config: Callable[[ModelFiles], FamilyConfig]
    """Raises CheckpointError with the field at fault."""
    weights: Callable[[FamilyConfig], Callable[[str], list[Target]]]
    """Maps a stored tensor's name to our names; to none for parts of the model that are not served."""
    aliases: tuple[str, ...] = ()
    """Other values of `model_type`, and architectures' names, in released files."""
    image_wrappers: tuple[str, str] | None = None
    """Tokens that the released processor puts around the placeholders of an image."""
