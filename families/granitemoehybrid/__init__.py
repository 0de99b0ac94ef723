"""Granite 4.0-H (IBM): Mamba-2 and attention, each followed by SwiGLU experts and a shared SwiGLU MLP. Text only."""

from families.family import Family
from families.granitemoehybrid.config import read_config
from families.granitemoehybrid.names import weights
from families.tool_calls import HERMES

FAMILY = Family(name="granitemoehybrid", read_config=read_config, weights=weights, tool_markups=(HERMES,))
