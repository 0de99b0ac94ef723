"""Maps names of published weights to the server's names.

A published layer is one layer here. Files have a shared block under the first layer that uses it, or under each of
them, with the adapters of all layers that share it: those of the n-th hybrid layer are number n of their lists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from decoder.layers.descriptions import SharedBlock
from families.family import FamilyConfig, Target

_OUTER = {
    "model.embed_tokens.weight": "model.embeddings.weight",
    "model.final_layernorm.weight": "model.norm_f.weight",
}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(?:mamba_decoder\.)?(.*)$")
# Prefix in a published layer -> prefix here.
_PARTS = {"input_layernorm.": "norm.", "mamba.": "mixer.", "linear.": "block.out."}
_SHARED = "shared_transformer."
_BLOCK = {
    "input_layernorm.": "norm.",
    "pre_ff_layernorm.": "mlp_norm.",
    "self_attn.": "attention.",
    "feed_forward.": "mlp.",
}
_GATE_UP = re.compile(r"^mlp\.gate_up_proj\.(weight|bias)$")
_ADAPTER = re.compile(r"^(?:attention\.linear_([qkv])|mlp\.gate_up_proj)_adapter_list\.(\d+)\.([01])\.weight$")


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    layers = enumerate(config.decoder.layers)
    blocks = {index: layer.branch[1] for index, layer in layers if layer.branch is not None}
    owners = {
        index: index if block.owner is None else block.owner
        for index, block in blocks.items()
        if isinstance(block, SharedBlock)
    }
    users, hybrid = Counter(owners.values()), list(owners)

    def block(owner: int, name: str) -> list[Target]:
        """Targets of a parameter of a shared block, by its name in the block."""
        shared = users[owner] > 1
        if adapter := _ADAPTER.match(name):
            letter, number, place = adapter[1] or "mlp", int(adapter[2]), int(adapter[3])
            if number < len(hybrid):
                of = f"model.layers.{hybrid[number]}.block.{letter}_adapter.{('down', 'up')[place]}.weight"
                return [Target(of, shared=shared)]
        ours = f"model.layers.{owner}.block."
        if both := _GATE_UP.match(name):
            halves = enumerate(("gate_proj", "up_proj"))
            return [Target(f"{ours}mlp.{half}.{both[1]}", "part", i, 2, shared=shared) for i, half in halves]
        return [Target(f"{ours}{name}", shared=shared)]

    def targets(name: str) -> list[Target]:
        if layer := _LAYER.match(name):
            index, inner = int(layer[1]), layer[2]
            if inner.startswith(_SHARED) and index in owners:
                inner = inner.removeprefix(_SHARED)
                for prefix, ours in _BLOCK.items():
                    if inner.startswith(prefix):
                        return block(owners[index], ours + inner.removeprefix(prefix))
            for prefix, ours in _PARTS.items():
                if inner.startswith(prefix):
                    return [Target(f"model.layers.{index}.{ours}{inner.removeprefix(prefix)}")]
        return [Target(_OUTER.get(name, name))]

    return targets
