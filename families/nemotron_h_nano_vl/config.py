"""Reads `config.json` and `preprocessor_config.json` of `NemotronH_Nano_VL_V2`.

The tower, the projector and the decoder have the fields of `nemotron_h_omni`. Later models of the same `model_type`
have limits on the patches of an image in `vision_config.args`, and no tiles: they are read as `nemotron_h_omni`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decoder.config import DecoderConfig
from families.family import FamilyConfig, ModelFiles
from families.fields import count, flag, number, only, section
from families.files import CheckpointError, checkpoint_errors, first, token_id
from families.nemotron_h.config import decoder_config
from families.nemotron_h_nano_vl.vision import TiledVision
from families.nemotron_h_omni.config import pruning_rate, radio_fields, tower_names
from families.nemotron_h_omni.config import read_config as read_omni
from families.tiles import LARGEST_TILE, MOST_TILES

_FILE = "preprocessor_config.json"
PROJECTOR_EPS = 1e-5
"""Epsilon of the projector's norm in files without the field."""


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""
    config = files.config
    if "min_num_patches" in section(section(config, "vision_config"), "args"):
        return read_omni(files)
    text = section(config, "llm_config", "text_config")
    decoder = decoder_config(text)
    tokens = {
        name: None if config.get(name) is None else token_id(name, config[name], decoder.vocab_size)
        for name in ("img_context_token_id", "video_context_token_id")
    }
    image, video = tokens.values()
    if image is not None and image == video:
        raise CheckpointError(f"config.json: img_context_token_id and video_context_token_id are both {image}")
    return FamilyConfig(text, decoder, _vision(files, text, decoder), image, video)


def _vision(files: ModelFiles, text: Mapping[str, Any], decoder: DecoderConfig) -> TiledVision:
    config = files.config
    for name, served, default in (("ps_version", "v2", "v1"), ("image_tag_type", "internvl", "internvl")):
        if (given := first(config, name, default=default)) != served:  # `default`: what an absent field stands for
            raise CheckpointError(f"config.json: {name} is {given!r}; this model is served with {served!r}")
    vision = section(config, "vision_config")
    for name, value in (("video_temporal_patch_size", 1), ("vitdet_window_size", None)):
        only(vision, name, value)
    fields = radio_fields(files, decoder)
    size = count(config, "force_image_size", 512, most=LARGEST_TILE)
    _check_processor(files.preprocessor, size, fields)
    with checkpoint_errors("vision_config", tower_names(vision)):
        return TiledVision(
            **fields,
            projector_eps=number(text, "rms_norm_eps", PROJECTOR_EPS),
            max_model_len=decoder.max_position_embeddings,
            video_temporal_patch_size=1,
            video_target_num_patches=max(size // fields["patch_size"], 1) ** 2,
            video_maintain_aspect_ratio=False,
            video_pruning_rate=pruning_rate(config),
            tile_size=size,
            max_tiles=count(files.preprocessor, "max_num_tiles", 12, most=MOST_TILES, file=_FILE),
            use_thumbnail=_thumbnail(files),
        )


def _thumbnail(files: ModelFiles) -> bool:
    """The image processor's flag; files without a processor have it in `config.json` too."""
    return flag(files.preprocessor, "use_thumbnail", flag(files.config, "use_thumbnail", True), file=_FILE)


def _check_processor(processor: Mapping[str, Any], size: int, fields: Mapping[str, Any]) -> None:
    """Raises CheckpointError if the image processor cuts images otherwise than `config.json` says. The other settings
    in its file have no effect, as in the released code, which always resizes, scales and normalises."""
    served = {
        "image_size": size, "patch_size": fields["patch_size"], "downsample_ratio": 1 / fields["merge_size"],
    }  # fmt: skip
    for name, value in served.items():
        if (given := first(processor, name, default=value)) != value:
            raise CheckpointError(f"{_FILE}: {name} is {given!r}, and config.json makes it {value:g}")
