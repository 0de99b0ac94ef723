"""Falcon-H1 (TII): Mamba-2 and attention in parallel in each layer, followed by a SwiGLU MLP, with constant multipliers
of most inputs and outputs. Text only."""

from families.falcon_h1.config import read_config
from families.falcon_h1.names import weights
from families.family import Family
from families.tool_calls import HERMES, HERMES_LIST

FAMILY = Family(
    name="falcon_h1",
    read_config=read_config,
    weights=weights,
    reasoning=("<think>", "</think>"),
    tool_markups=(HERMES_LIST, HERMES),
)
