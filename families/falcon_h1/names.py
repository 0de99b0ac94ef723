"""Maps names of published weights to the server's names.

A published layer is two layers here: Mamba-2 and attention in parallel, then the MLP. Norms and biases are multiplied
by constants (`families/falcon_h1/multipliers.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from families.falcon_h1.multipliers import Multipliers
from families.family import FamilyConfig, Target

_OUTER = {
    "model.embed_tokens.weight": "model.embeddings.weight",
    "model.final_layernorm.weight": "model.norm_f.weight",
}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.*)$")


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    of = Multipliers.read(config.text)
    # Prefix in a published layer -> (which of the two layers here, prefix in it, factor of norms and biases).
    parts = {
        "input_layernorm.": (0, "norm.", of.mixer_norm),
        "pre_ff_layernorm.": (1, "norm.", of.mlp_norm),
        "mamba.in_proj.bias": (0, "mamba.in_proj.bias", of.in_proj_bias),
        "mamba.": (0, "mamba.", 1.0),
        "self_attn.": (0, "self_attn.", of.attention_bias),
        "feed_forward.": (1, "feed_forward.", of.mlp_norm),
    }

    def targets(name: str) -> list[Target]:
        if layer := _LAYER.match(name):
            for prefix, (which, ours, factor) in parts.items():
                if layer[2].startswith(prefix):
                    inner = f"{ours}{layer[2].removeprefix(prefix)}"
                    scaled = inner == "norm.weight" or inner.endswith(".bias")
                    found = f"model.layers.{2 * int(layer[1]) + which}.{inner}"
                    return [Target(found, factor=factor if scaled else 1.0)]
        return [Target(_OUTER.get(name, name))]

    return targets
