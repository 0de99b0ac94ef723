"""The checkpoint of a server's options, and values that both determine together: the context length, and the vision
part for it."""

from __future__ import annotations

from families import VisionSpec
from service.common.config import ConfigError, EngineOptions
from service.model.checkpoint import Checkpoint, open_checkpoint

DEFAULT_MAX_LEN = 8192


def checkpoint_of(options: EngineOptions, *, outline: bool = False) -> Checkpoint:
    """Opens the model of the options with their adapter; see `open_checkpoint`. Raises CheckpointError."""
    return open_checkpoint(
        options.model, options.revision, adapter=options.adapter, adapter_revision=options.adapter_revision,
        outline=outline,
    )  # fmt: skip


def resolve_max_len(options: EngineOptions, checkpoint: Checkpoint) -> int:
    """The context length: that of the option, otherwise the model's, at most 8192. Raises ConfigError if a model that
    uses positions was trained for fewer; a model without positions has no such limit.
    """
    decoder = checkpoint.config.decoder
    trained = decoder.max_position_embeddings
    if options.max_len and options.max_len > trained and decoder.position_axes:
        raise ConfigError(f"max_len: {options.max_len} is above the {trained} positions that the model was trained for")
    return options.max_len or min(trained, DEFAULT_MAX_LEN)


def resolve_vision(options: EngineOptions, checkpoint: Checkpoint) -> VisionSpec | None:
    """The vision configuration, limited by the context length. None for text-only models."""
    vision = checkpoint.config.vision
    if vision is None:
        return None
    rate = options.video_pruning_rate
    if rate is not None and not 0 <= rate < 1:
        raise ConfigError(f"video_pruning_rate: {rate:g} is not at least 0 and below 1; 0.5 drops half")
    length = resolve_max_len(options, checkpoint)
    try:
        return vision.limited(max_model_len=length, video_pruning_rate=rate)
    except ValueError as error:
        raise ConfigError(str(error)) from None
