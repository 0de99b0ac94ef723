"""`config.json` and the processors' files -> `DecoderConfig` and `CanvasVision`.

Reference: transformers, models/minicpmv4_7/configuration_minicpmv4_7.py.
"""

from __future__ import annotations

from typing import Any

from families.family import FamilyConfig, ModelFiles
from families.files import first, token_id
from families.minicpmv4_6.config import family_config
from families.minicpmv4_7.positions import AXES, Markers
from families.minicpmv4_7.vision import CanvasVision


def read_config(files: ModelFiles) -> FamilyConfig:
    """Reads the configuration of a model directory. Raises CheckpointError naming the field at fault."""

    def vision(vocabulary: int, **fields: Any) -> CanvasVision:
        ids = (token_id(f"{name}_id", first(files.config, f"{name}_id"), vocabulary) for name in Markers._fields)
        return CanvasVision(**fields, markers=Markers(*ids), number_videos=False)

    return family_config(files, vision, axes=AXES)
