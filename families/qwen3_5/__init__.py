"""Qwen3.5, 3.6 and 3.8 (Alibaba): gated delta and gated attention layers, each followed by a SwiGLU MLP or experts."""

from functools import partial

from families.family import Family
from families.qwen3_5.config import read_config
from families.qwen3_5.names import weights
from families.tool_calls import HERMES, XML

FAMILY = Family(
    name="qwen3_5",
    read_config=partial(read_config, moe=False),
    weights=weights,
    aliases=("qwen3_5_text", "Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    image_wrappers=("<|vision_start|>", "<|vision_end|>"),
    reasoning=("<think>", "</think>"),
    tool_markups=(XML, HERMES),
)
MOE_FAMILY = Family(
    name="qwen3_5_moe",
    read_config=partial(read_config, moe=True),
    weights=weights,
    aliases=("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    image_wrappers=("<|vision_start|>", "<|vision_end|>"),
    reasoning=("<think>", "</think>"),
    tool_markups=(XML, HERMES),
)
