"""Maps names of published weights to the server's names.

A published layer is two layers here: Mamba-2 or attention, then experts beside the shared MLP. Gate and up projections
are one published tensor and two tensors here. Released files and transformers' modules name the experts' tensors
differently; quantised files have each expert's matrices one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target

_OUTER = {"model.embed_tokens.weight": "model.embeddings.weight", "model.norm.weight": "model.norm_f.weight"}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.*)$")
# Name, or prefix ending in a dot, in a published layer -> which of the two layers here, and the name in it.
_PARTS = {
    "input_layernorm.": (0, "norm."),
    "post_attention_layernorm.": (1, "norm."),
    "mamba.": (0, "mixer."),
    "self_attn.": (0, "mixer."),
    "shared_mlp.output_linear.": (1, "shared_mlp.down_proj."),
    "block_sparse_moe.output_linear.weight": (1, "moe.experts.down_proj"),
    "block_sparse_moe.experts.down_proj": (1, "moe.experts.down_proj"),
    "block_sparse_moe.router.layer.weight": (1, "moe.gate.weight"),
    "block_sparse_moe.router.weight": (1, "moe.gate.weight"),
}
_EXPERT = re.compile(r"^block_sparse_moe\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_FUSED = {
    "shared_mlp.input_linear.weight": ("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight"),
    "block_sparse_moe.input_linear.weight": ("moe.experts.gate_proj", "moe.experts.up_proj"),
    "block_sparse_moe.experts.gate_up_proj": ("moe.experts.gate_proj", "moe.experts.up_proj"),
}


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    return targets


def targets(name: str) -> list[Target]:
    if layer := _LAYER.match(name):
        index, inner = 2 * int(layer[1]), layer[2]
        if fused := _FUSED.get(inner):
            return [Target(f"model.layers.{index + 1}.{ours}", "part", i, len(fused)) for i, ours in enumerate(fused)]
        if expert := _EXPERT.match(inner):
            return [Target(f"model.layers.{index + 1}.moe.experts.{expert[2]}", "stack", int(expert[1]))]
        for prefix, (which, ours) in _PARTS.items():
            if inner.startswith(prefix):
                return [Target(f"model.layers.{index + which}.{ours}{inner.removeprefix(prefix)}")]
    return [Target(_OUTER.get(name, name))]
