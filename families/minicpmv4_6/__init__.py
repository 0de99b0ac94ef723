"""MiniCPM-V 4.6 (OpenBMB): sliced images and a window-merging SigLIP tower in front of Qwen3.5's decoder."""

from families.family import Family
from families.minicpmv4_6.config import read_config
from families.minicpmv4_6.names import weights
from families.tool_calls import HERMES, XML

FAMILY = Family(
    name="minicpmv4_6",
    read_config=read_config,
    weights=weights,
    aliases=("MiniCPMV4_6ForConditionalGeneration",),
    reasoning=("<think>", "</think>"),
    tool_markups=(XML, HERMES),
)
