"""Qwen3-Next and Qwen3-Coder-Next (Alibaba): gated delta and gated attention layers, followed by experts. Text only."""

from families.family import Family
from families.qwen3_next.config import read_config
from families.qwen3_next.names import weights
from families.tool_calls import HERMES, XML

FAMILY = Family(
    name="qwen3_next",
    read_config=read_config,
    weights=weights,
    aliases=("Qwen3NextForCausalLM",),
    reasoning=("<think>", "</think>"),
    tool_markups=(XML, HERMES),
)
