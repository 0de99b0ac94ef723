"""LFM3-VL (Liquid AI): a tower of gated convolutions over the grid of patches and of attention, in front of LFM3's
decoder. Images and videos."""

from families import lfm2
from families.family import Family
from families.lfm3_vl.config import read_config
from families.lfm3_vl.names import weights

FAMILY = Family(
    name="lfm3_vl",
    read_config=read_config,
    weights=weights,
    aliases=("Lfm3VlForConditionalGeneration",),
    image_wrappers=("<|vision_start|>", "<|vision_end|>"),
    reasoning=lfm2.FAMILY.reasoning,
    tool_markups=lfm2.FAMILY.tool_markups,
)
