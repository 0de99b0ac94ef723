"""Model families: how to read a published `config.json` and its weights.

One folder per family; nothing outside this package names one.
"""

from families.family import (
    CutsSlices,
    Family,
    FamilyConfig,
    ImageRule,
    ModelFiles,
    SlicingRule,
    Target,
    VideoRule,
    VisionSpec,
)
from families.files import CheckpointError
from families.registry import family_of, served_model_types

__all__ = [
    "CheckpointError",
    "CutsSlices",
    "Family",
    "FamilyConfig",
    "ImageRule",
    "ModelFiles",
    "SlicingRule",
    "Target",
    "VideoRule",
    "VisionSpec",
    "family_of",
    "served_model_types",
]
