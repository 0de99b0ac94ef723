"""Text-only NemotronH: Mamba-2, attention without positions, squared-ReLU MLP and mixture-of-experts layers."""

from families.family import Family
from families.nemotron_h.config import read_config
from families.nemotron_h.names import weights
from families.tool_calls import CALL_LIST, XML

FAMILY = Family(
    name="nemotron_h",
    read_config=read_config,
    weights=weights,
    reasoning=("<think>", "</think>"),
    tool_markups=(XML, CALL_LIST),
)
