"""MiniCPM-V 4.7 (OpenBMB): MiniCPM-V 4.6 with positions on which an image and its slices share a canvas."""

from families.family import Family
from families.minicpmv4_6.names import weights
from families.minicpmv4_7.config import read_config
from families.tool_calls import HERMES, XML

FAMILY = Family(
    name="minicpmv4_7",
    read_config=read_config,
    weights=weights,
    aliases=("MiniCPMV4_7ForConditionalGeneration",),
    reasoning=("<think>", "</think>"),
    tool_markups=(XML, HERMES),
)
