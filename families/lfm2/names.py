"""Maps names of published weights to the server's names.

A published layer is two layers here: short convolution or attention, then the MLP or experts. Experts are stored one by
one, or as one tensor (gate projections before up projections).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target

_OUTER = {
    "embed_tokens.weight": "model.embeddings.weight",
    "embedding_norm.weight": "model.norm_f.weight",
}
_LAYER = re.compile(r"^layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^feed_forward\.experts\.(\d+)\.(w[123])\.weight$")
_OF_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Prefix in a published layer -> (which of the two layers here, prefix in it).
_PARTS = {
    "operator_norm.": (0, "norm."),
    "post_operator_norm.": (0, "post_norm."),  # LFM3
    "ffn_norm.": (1, "norm."),
    "post_ffn_norm.": (1, "post_norm."),  # LFM3
    "conv.conv.": (0, "mixer.conv1d."),
    "conv.": (0, "mixer."),
    "self_attn.out_proj.": (0, "mixer.o_proj."),
    "self_attn.q_layernorm.": (0, "mixer.q_norm."),
    "self_attn.k_layernorm.": (0, "mixer.k_norm."),
    "self_attn.gate_proj.": (0, "mixer.g_proj."),  # LFM3
    "self_attn.": (0, "mixer."),
    "feed_forward.gate.": (1, "mixer.gate."),
    "feed_forward.expert_bias": (1, "mixer.gate.e_score_correction_bias"),
    "feed_forward.experts.down_proj": (1, "mixer.experts.down_proj"),
    "feed_forward.w1.": (1, "mixer.gate_proj."),
    "feed_forward.w3.": (1, "mixer.up_proj."),
    "feed_forward.w2.": (1, "mixer.down_proj."),
}


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    return targets


def targets(name: str, prefix: str = "model.") -> list[Target]:
    """Our tensors for a stored one. `prefix`: of the decoder's tensors other than `lm_head.weight`. Unknown names are
    returned unchanged."""
    if not name.startswith(prefix):
        return [Target(name)]
    inner = name.removeprefix(prefix)
    if layer := _LAYER.match(inner):
        of, part = 2 * int(layer[1]), layer[2]
        if expert := _EXPERT.match(part):
            ours = f"model.layers.{of + 1}.mixer.experts.{_OF_EXPERT[expert[2]]}"
            return [Target(ours, "stack", int(expert[1]))]
        if part == "feed_forward.experts.gate_up_proj":
            both = enumerate(("gate_proj", "up_proj"))
            return [Target(f"model.layers.{of + 1}.mixer.experts.{ours}", "part", place, 2) for place, ours in both]
        for stored, (which, ours) in _PARTS.items():
            if part.startswith(stored):
                return [Target(f"model.layers.{of + which}.{ours}{part.removeprefix(stored)}")]
    return [Target(_OUTER.get(inner, name))]
