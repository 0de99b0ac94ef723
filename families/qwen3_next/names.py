"""Maps names of published weights to the server's names.

They are those of Qwen3.5, but for the input projections of the gated delta rule. `in_proj_qkvz` has, for each key head,
the rows of its query, its key, the values of its value heads, and their gates; `in_proj_ba` has b, then a, of its value
heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from decoder.layers.recurrent_descriptions import GatedDelta
from families.family import FamilyConfig, Target
from families.qwen3_5.names import decoder_targets


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    delta = next((spec for spec in config.decoder.mixers if isinstance(spec, GatedDelta)), None)

    def targets(name: str) -> list[Target]:
        found = decoder_targets(name, config.decoder)
        if delta is None or len(found) != 1:
            return found
        prefix, projection, rest = found[0].name.rpartition("in_proj_")
        if projection and rest == "qkvz.weight":
            return _queries_to_gates(prefix + projection, delta)
        if projection and rest == "ba.weight":
            places = enumerate("ba")
            return [Target(f"{prefix}in_proj_{x}.weight", "part", i, 2, groups=delta.num_key_heads) for i, x in places]
        return found

    return targets


def _queries_to_gates(prefix: str, delta: GatedDelta) -> list[Target]:
    heads, values = delta.num_key_heads, delta.values // delta.num_key_heads
    unit = math.gcd(delta.key_head_dim, values)
    key, value = delta.key_head_dim // unit, values // unit
    gates, parts = 2 * key + value, 2 * (key + value)
    qkv = ((0, key), (key, 2 * key), (2 * key, gates))
    return [
        Target(f"{prefix}qkv.weight", "part", parts=parts, groups=heads, ranges=qkv),
        Target(f"{prefix}z.weight", "part", parts=parts, groups=heads, ranges=((gates, parts),)),
    ]
