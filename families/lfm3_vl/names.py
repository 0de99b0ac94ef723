"""Maps names of published weights to the server's names: those of the tower and the projector to transformers' names,
without prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target
from families.lfm3.names import targets as decoder_targets

_VISION = re.compile(r"^(?:model\.)?(?=vision_tower\.|multi_modal_projector\.)")
_RELEASED = {"patchifier": "patch_embed", "q_layernorm": "q_norm", "k_layernorm": "k_norm"}
"""Names in released files -> those that transformers gives them."""


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    return targets


def targets(name: str) -> list[Target]:
    """Our tensors for a stored one."""
    if vision := _VISION.match(name):
        ours = name[vision.end() :]
        for released, known in _RELEASED.items():
            ours = ours.replace(f".{released}.", f".{known}.")
        return [Target(ours)]
    return decoder_targets(name, "language_model." if name.startswith("language_model.") else "model.language_model.")
