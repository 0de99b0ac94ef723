"""Maps names of published weights to the server's names.

A published layer is two layers here: Mamba-2 or attention, then the MLP.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target

_OUTER = {
    "model.embed_tokens.weight": "model.embeddings.weight",
    "model.final_layernorm.weight": "model.norm_f.weight",
}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.*)$")
# Prefix in a published layer -> (which of the two layers here, prefix in it).
_PARTS = {
    "input_layernorm.": (0, "norm."),
    "pre_ff_layernorm.": (1, "norm."),
    "mamba.": (0, "mixer."),
    "self_attn.": (0, "mixer."),
    "feed_forward.": (1, "mixer."),
}


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    return targets


def targets(name: str) -> list[Target]:
    if layer := _LAYER.match(name):
        for prefix, (which, ours) in _PARTS.items():
            if layer[2].startswith(prefix):
                return [Target(f"model.layers.{2 * int(layer[1]) + which}.{ours}{layer[2].removeprefix(prefix)}")]
    return [Target(_OUTER.get(name, name))]
