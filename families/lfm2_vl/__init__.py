"""LFM2-VL and LFM2.5-VL (Liquid AI): tiled images and a SigLIP2 tower in front of LFM2's decoder."""

from families import lfm2
from families.family import Family
from families.lfm2_vl.config import read_config
from families.lfm2_vl.names import weights

FAMILY = Family(
    name="lfm2_vl",
    read_config=read_config,
    weights=weights,
    aliases=("Lfm2VlForConditionalGeneration",),
    reasoning=lfm2.FAMILY.reasoning,
    tool_markups=lfm2.FAMILY.tool_markups,
)
