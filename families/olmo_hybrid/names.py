"""Maps names of published weights to the server's names.

A published layer is two layers here: gated delta rule or attention, then the MLP. The names of norms say what they
stand before or after, and differ between both kinds of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target

_OUTER = {"model.embed_tokens.weight": "model.embeddings.weight", "model.norm.weight": "model.norm_f.weight"}
_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.*)$")
# Prefix in a published layer -> (which of the two layers here, prefix in it).
_PARTS = {
    "linear_attn.q_proj.": (0, "mixer.in_proj_q."),
    "linear_attn.k_proj.": (0, "mixer.in_proj_k."),
    "linear_attn.v_proj.": (0, "mixer.in_proj_v."),
    "linear_attn.g_proj.": (0, "mixer.in_proj_z."),
    "linear_attn.b_proj.": (0, "mixer.in_proj_b."),
    "linear_attn.a_proj.": (0, "mixer.in_proj_a."),
    "linear_attn.o_proj.": (0, "mixer.out_proj."),
    "linear_attn.o_norm.": (0, "mixer.norm."),
    "linear_attn.": (0, "mixer."),
    "self_attn.": (0, "mixer."),
    "mlp.": (1, "mixer."),
    "attention_layer_norm.": (0, "norm."),
    "input_layernorm.": (0, "norm."),
    "post_feedforward_layernorm.": (1, "post_norm."),
}
_CONVOLUTION = re.compile(r"^linear_attn\.([qkv])_conv1d\.weight$")
_AFTER_ATTENTION = ("post_attention_layernorm.", "feedforward_layer_norm.")
"""Names of one norm, in transformers and in released files. In layers with attention it is that of attention, in others
that of the MLP."""


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    layers = config.decoder.layers

    def targets(name: str) -> list[Target]:
        if name.startswith("mtp."):
            return []
        if layer := _LAYER.match(name):
            first = 2 * int(layer[1])
            if part := _CONVOLUTION.match(layer[2]):  # the channels of queries, keys and values; or equal thirds
                return [Target(f"model.layers.{first}.mixer.conv1d.weight", "joined", "qkv".index(part[1]))]
            attention = first < len(layers) and layers[first].norm_after
            between = dict.fromkeys(_AFTER_ATTENTION, (0, "post_norm.") if attention else (1, "norm."))
            for prefix, (which, ours) in (_PARTS | between).items():
                if layer[2].startswith(prefix):
                    return [Target(f"model.layers.{first + which}.{ours}{layer[2].removeprefix(prefix)}")]
        return [Target(_OUTER.get(name, name))]

    return targets
