"""`config.json` and the processors' files -> `DecoderConfig` and `SlicingVision`.

Reference: transformers, models/minicpmv4_6/configuration_minicpmv4_6.py. `text_config` has the fields of
`qwen3_5_text`, or of `qwen3_5_moe_text`.
"""

from __future__ import annotations

from typing import Any, Protocol

from families.family import FamilyConfig, ModelFiles
from families.fields import TOWER_NAMES, flag, section
from families.files import CheckpointError, checkpoint_errors, first, token_id
from families.minicpmv4_6.vision import SlicingVision
from families.minicpmv4_6.vision_config import vision_fields
from families.qwen3_5.config import decoder_config

TEXTS = {"qwen3_5_text": False, "qwen3_5_moe_text": True}
"""Types of decoders, and whether they have experts."""


class MakeVision(Protocol):
    """Makes the vision part of a model; `vocabulary`: its size, for ids of tokens."""

    def __call__(self, vocabulary: int, **fields: Any) -> SlicingVision: ...


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""
    # Image tokens take one position each, like text, so positions have one axis.
    return family_config(files, lambda vocabulary, **fields: SlicingVision(**fields), axes=1)


def family_config(files: ModelFiles, make_vision: MakeVision, *, axes: int) -> FamilyConfig:
    """`read_config` for a model of `axes` axes of positions."""
    config = files.config
    text = section(config, "text_config")
    kind = first(text, "model_type", default="qwen3_5_text")
    if not isinstance(kind, str) or kind not in TEXTS:
        raise CheckpointError(f"config.json: text_config.model_type is {kind!r}; served are {', '.join(TEXTS)}")
    tied = flag(config, "tie_word_embeddings", flag(text, "tie_word_embeddings"))
    decoder = decoder_config(text, moe=TEXTS[kind], tied=tied, axes=axes)
    with checkpoint_errors("config.json", TOWER_NAMES):
        vision = make_vision(decoder.vocab_size, **vision_fields(config, decoder.hidden_size, files))
    tokens = [
        None if (given := first(config, name)) is None else token_id(name, given, decoder.vocab_size)
        for name in ("image_token_id", "video_token_id")
    ]
    if tokens[0] is not None and tokens[0] == tokens[1]:
        raise CheckpointError(f"config.json: image_token_id and video_token_id are both {tokens[0]}")
    return FamilyConfig(text, decoder, vision, *tokens)
