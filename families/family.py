"""What a model family is to the rest of the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from decoder.config import DecoderConfig
from encoder.config import VisionConfig


@dataclass(frozen=True)
class ModelFiles:
    """The JSON files of one model directory; empty mappings stand for files that are not there."""

    path: Path
    config: Mapping[str, Any]
    """`config.json`."""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """`preprocessor_config.json`, the image processor's part where it is nested."""


@dataclass(frozen=True)
class FamilyConfig:
    """What a family reads from a model directory."""

    text: Mapping[str, Any] = field(compare=False)
    """The section of `config.json` about the decoder; the whole file for text-only models."""
    decoder: DecoderConfig
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    """The placeholder that the prompt holds for each image; None for text-only models."""


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
