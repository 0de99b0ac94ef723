"""LFM3 (Liquid AI): gated short convolutions, and attention over all keys or a window of them, each followed by a
SwiGLU MLP, with norms before and after. Text only."""

from families import lfm2
from families.family import Family
from families.lfm3.config import read_config
from families.lfm3.names import weights

FAMILY = Family(
    name="lfm3",
    read_config=read_config,
    weights=weights,
    aliases=("Lfm3ForCausalLM",),
    reasoning=lfm2.FAMILY.reasoning,
    tool_markups=lfm2.FAMILY.tool_markups,
)
