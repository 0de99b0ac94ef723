"""Maps names of published weights to the server's names.

A published layer is two layers here: short convolution or attention, then the MLP.
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
# Prefix in a published layer -> (which of the two layers here, prefix in it).
_PARTS = {
    "operator_norm.": (0, "norm."),
    "ffn_norm.": (1, "norm."),
    "conv.conv.": (0, "mixer.conv1d."),
    "conv.": (0, "mixer."),
    "self_attn.out_proj.": (0, "mixer.o_proj."),
    "self_attn.q_layernorm.": (0, "mixer.q_norm."),
    "self_attn.k_layernorm.": (0, "mixer.k_norm."),
    "self_attn.": (0, "mixer."),
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
        for stored, (which, ours) in _PARTS.items():
            if layer[2].startswith(stored):
                return [Target(f"model.layers.{2 * int(layer[1]) + which}.{ours}{layer[2].removeprefix(stored)}")]
    return [Target(_OUTER.get(inner, name))]
