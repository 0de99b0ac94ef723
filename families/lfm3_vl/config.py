"""`config.json` and the processors' files -> `DecoderConfig` and `GridVision`.

Reference: transformers, models/lfm3_vl/configuration_lfm3_vl.py. `text_config` has the fields of `lfm3`.
"""

from __future__ import annotations

from dataclasses import replace

from families.family import FamilyConfig, ModelFiles
from families.fields import flag, section
from families.files import CheckpointError, checkpoint_errors, first, token_id
from families.lfm3.config import decoder_config
from families.lfm3_vl.vision import GridVision
from families.lfm3_vl.vision_config import vision_fields

TEXT = "lfm3"
IMAGE_TOKEN, VIDEO_TOKEN = 125030, 125029
"""Ids of the placeholders of images and of clips in files without the fields."""


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""
    config = files.config
    text = section(config, "text_config")
    if (kind := first(text, "model_type", default=TEXT)) != TEXT:
        raise CheckpointError(f"config.json: text_config.model_type is {kind!r}; {TEXT!r} is served")
    # Whether embeddings are tied is said at the top level; transformers does not read the text's own field.
    tied = flag(config, "tie_word_embeddings", True)
    decoder = replace(decoder_config(text), tie_word_embeddings=tied)
    with checkpoint_errors("config.json"):
        vision = GridVision(**vision_fields(config, decoder.hidden_size, files))
    image, video = (
        token_id(name, first(config, name, default=default), decoder.vocab_size)
        for name, default in (("image_token_id", IMAGE_TOKEN), ("video_token_id", VIDEO_TOKEN))
    )
    if image == video:
        raise CheckpointError(f"config.json: image_token_id and video_token_id are both {image}")
    return FamilyConfig(text, decoder, vision, image, video)
