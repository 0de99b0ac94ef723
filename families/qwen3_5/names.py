"""Maps names of published weights to the server's names.

A published layer is two layers here: gated delta rule or attention, then the MLP or experts. Queries and the gates of
attention's output are one published tensor, interleaved by head. Norms store their weight minus 1, except those of the
gated delta rule. Experts are stored as one tensor (gate projections before up projections) or one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention
from families.family import FamilyConfig, Target
from families.qwen3_5.vision import vision_targets

# `model.language_model.` in vision-language models, `model.` in text-only ones; converted files have further prefixes.
_PREFIX = re.compile(r"^(model\.)?(language_model\.)?(model\.)?(?=embed_tokens\.|norm\.|layers\.|mtp\.|lm_head\.)")
_LAYER = re.compile(r"^(mtp\.)?layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_QUERIES = re.compile(r"^self_attn\.q_proj\.(weight|bias)$")
# Name, or prefix ending in a dot, in a published layer -> which of the two layers here, and the name in it.
_PARTS = {
    "input_layernorm.": (0, "norm."),
    "post_attention_layernorm.": (1, "norm."),
    "linear_attn.": (0, "mixer."),
    "self_attn.": (0, "mixer."),
    "mlp.shared_expert.": (1, "mixer.shared_experts."),
    "mlp.": (1, "mixer."),
}
_OUTER = {
    "embed_tokens.weight": "model.embeddings.weight",
    "norm.weight": "model.norm_f.weight",
    "mtp.fc.weight": "mtp.layers.0.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "mtp.layers.0.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "mtp.layers.0.hnorm.weight",
    "mtp.norm.weight": "mtp.layers.1.final_layernorm.weight",
}
_CENTRED = re.compile(r"^(mtp\.)?norm\.weight$|layernorm\.weight$|\.[qk]_norm\.weight$|^mtp\.pre_fc_norm_\w+\.weight$")


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    def targets(name: str) -> list[Target]:
        tower = vision_targets(name)
        if tower is None:
            return decoder_targets(name, config.decoder)
        return tower if config.vision is not None else []

    return targets


def decoder_targets(name: str, config: DecoderConfig) -> list[Target]:
    """The server's tensors for a stored tensor of the decoder; none for a tensor of multi-token prediction heads that
    the configuration does not have. Unknown names are returned unchanged."""
    inner = _PREFIX.sub("", name)
    if inner.startswith("mtp.") and not config.mtp:
        return []
    if layer := _LAYER.match(inner):
        first, part = 2 * int(layer[2]), layer[3]
        if layer[1] and first:
            return [Target(name)]
        return _layer_targets(f"{layer[1] or 'model.'}layers.", first, part, config) or [Target(name)]
    if inner == "lm_head.weight":
        return [Target(inner)]
    if (ours := _OUTER.get(inner)) is None:
        return [Target(name)]
    return [Target(ours, offset=_offset(inner))]


def _layer_targets(prefix: str, first: int, part: str, config: DecoderConfig) -> list[Target]:
    if queries := _QUERIES.match(part):
        both, heads = ("q_proj", "gate_proj"), _heads(config)
        return [
            Target(f"{prefix}{first}.mixer.{ours}.{queries[1]}", "part", place, 2, groups=heads)
            for place, ours in enumerate(both)
        ]
    if expert := _EXPERT.match(part):
        return [Target(f"{prefix}{first + 1}.mixer.experts.{expert[2]}", "stack", int(expert[1]))]
    if part == "mlp.experts.gate_up_proj":
        both = ("gate_proj", "up_proj")
        return [
            Target(f"{prefix}{first + 1}.mixer.experts.{ours}", "part", place, 2) for place, ours in enumerate(both)
        ]
    for stored, (which, ours) in _PARTS.items():
        if part.startswith(stored):
            name = f"{prefix}{first + which}.{ours}{part.removeprefix(stored)}"
            return [Target(name, offset=_offset(part))]
    return []


def _heads(config: DecoderConfig) -> int:
    """Number of attention heads, which is the same in all layers."""
    specs = (*config.mixers, *config.mtp)
    return next((spec.num_attention_heads for spec in specs if isinstance(spec, Attention)), 1)


def _offset(part: str) -> float:
    """1 for norms that store their weight minus 1, otherwise 0."""
    return 1.0 if _CENTRED.search(part) else 0.0
