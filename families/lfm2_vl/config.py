"""`config.json` and the processor's files -> `DecoderConfig` and `TiledVision`.

Reference: transformers, models/lfm2_vl/configuration_lfm2_vl.py. `text_config` has the fields of `lfm2`.
"""

from __future__ import annotations

from dataclasses import replace

from families.family import FamilyConfig, ModelFiles
from families.fields import TOWER_NAMES, section
from families.files import CheckpointError, checkpoint_errors, first, token_id
from families.lfm2.config import decoder_config, tied
from families.lfm2_vl.vision import TiledVision
from families.lfm2_vl.vision_config import vision_fields

TEXT = "lfm2"
IMAGE_TOKEN = 396
"""Id of the placeholder in files without the field."""


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""
    config = files.config
    text = section(config, "text_config")
    if (kind := first(text, "model_type", default=TEXT)) != TEXT:
        raise CheckpointError(f"config.json: text_config.model_type is {kind!r}; {TEXT!r} is served")
    # Whether embeddings are tied is said at the top level; transformers does not read the text's own field.
    decoder = replace(decoder_config(text), tie_word_embeddings=tied(config))
    with checkpoint_errors("config.json", TOWER_NAMES):
        vision = TiledVision(**vision_fields(config, decoder.hidden_size, files))
    token = first(config, "image_token_id", default=IMAGE_TOKEN)
    return FamilyConfig(text, decoder, vision, token_id("image_token_id", token, decoder.vocab_size))
