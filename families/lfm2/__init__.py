"""LFM2 and LFM2.5 (Liquid AI): gated short convolutions and grouped-query attention, each followed by a SwiGLU MLP or
experts. Text only."""

from families.family import Family
from families.lfm2.config import read_config, read_moe_config
from families.lfm2.names import weights
from families.tool_calls import PYTHON_LIST

FAMILY = Family(
    name="lfm2",
    read_config=read_config,
    weights=weights,
    aliases=("Lfm2ForCausalLM",),
    reasoning=("<think>", "</think>"),
    tool_markups=(PYTHON_LIST,),
)
MOE_FAMILY = Family(
    name="lfm2_moe",
    read_config=read_moe_config,
    weights=weights,
    aliases=("Lfm2MoeForCausalLM",),
    reasoning=FAMILY.reasoning,
    tool_markups=FAMILY.tool_markups,
)
