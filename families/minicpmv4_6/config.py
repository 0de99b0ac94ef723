"""`config.json` and `preprocessor_config.json` -> `DecoderConfig` and `SlicingVision`.

Reference: transformers, models/minicpmv4_6/configuration_minicpmv4_6.py. `text_config` has the fields of
`qwen3_5_text`.
"""

from __future__ import annotations

from families.family import FamilyConfig, ModelFiles
from families.fields import flag, section
from families.files import CheckpointError, first, token_id
from families.minicpmv4_6.vision import SlicingVision
from families.minicpmv4_6.vision_config import vision_fields
from families.qwen3_5.config import decoder_config


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""
    config = files.config
    text = section(config, "text_config")
    if (kind := first(text, "model_type", default="qwen3_5_text")) != "qwen3_5_text":
        raise CheckpointError(f"config.json: text_config.model_type is {kind!r}; 'qwen3_5_text' is served here")
    tied = flag(config, "tie_word_embeddings", flag(text, "tie_word_embeddings"))
    # Image tokens take one position each, like text, so positions have one axis.
    decoder = decoder_config(text, tied=tied)
    try:
        vision = SlicingVision(**vision_fields(config, decoder.hidden_size, files))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from None
    tokens = [
        None if (given := first(config, name)) is None else token_id(name, given, decoder.vocab_size)
        for name in ("image_token_id", "video_token_id")
    ]
    if tokens[0] is not None and tokens[0] == tokens[1]:
        raise CheckpointError(f"config.json: image_token_id and video_token_id are both {tokens[0]}")
    return FamilyConfig(text, decoder, vision, *tokens)
