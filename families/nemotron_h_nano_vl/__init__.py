"""Nemotron Nano VL v2: tiles of 512 pixels, Nemotron Omni's tower and projector in front of a NemotronH decoder."""

from families import nemotron_h_omni
from families.family import Family
from families.nemotron_h_nano_vl.config import read_config

FAMILY = Family(
    name="NemotronH_Nano_VL_V2",
    read_config=read_config,
    weights=nemotron_h_omni.FAMILY.weights,
    image_wrappers=nemotron_h_omni.FAMILY.image_wrappers,
    reasoning=nemotron_h_omni.FAMILY.reasoning,
    tool_markups=nemotron_h_omni.FAMILY.tool_markups,
)
