"""Nemotron Omni: RADIO vision tower at dynamic resolution, pixel shuffle and projector in front of a NemotronH
decoder."""

from families.family import Family
from families.nemotron_h_omni.config import read_config
from families.nemotron_h_omni.names import weights
from families.tool_calls import CALL_LIST, XML

FAMILY = Family(
    name="nemotron_h_omni",
    read_config=read_config,
    weights=weights,
    # `model_type` of released files that predate the type in transformers.
    aliases=("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3"),
    image_wrappers=("<img>", "</img>"),
    reasoning=("<think>", "</think>"),
    tool_markups=(XML, CALL_LIST),
)
