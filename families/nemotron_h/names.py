"""Maps names of published weights to the server's names.

NVIDIA's releases (and, by default, transformers' `save_pretrained`) have `backbone.layers.0...`; transformers' modules
have `model.layers.0...`, and so does the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target

_RENAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^language_model\.", ""),
        (r"^(backbone|model)\.mtp\.", "mtp."),
        (r"^backbone\.", "model."),
    )
)
_EXPERT = re.compile(r"^(.*\.mixer\.experts)\.(\d+)\.(up_proj|down_proj)\.weight$")


def decoder_targets(name: str, has_mtp: bool) -> list[Target]:
    """The server's tensors for a stored tensor of the decoder. `has_mtp`: whether the model has multi-token prediction
    heads; without, their tensors are not used."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if name.startswith("mtp.") and not has_mtp:
        return []
    if expert := _EXPERT.match(name):
        return [Target(f"{expert[1]}.{expert[3]}", "stack", int(expert[2]))]
    return [Target(name)]


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    has_mtp = bool(config.decoder.mtp)
    return lambda name: decoder_targets(name, has_mtp)
