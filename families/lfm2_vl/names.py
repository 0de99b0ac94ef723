"""Maps names of published weights to the server's names. The tower and the projector only lose prefixes."""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target
from families.lfm2.names import targets as decoder_targets

_VISION = re.compile(r"^(?:model\.)?(?:(vision_tower\.)(?:vision_model\.)?|(?=multi_modal_projector\.))")
_HEAD = "vision_tower.head."
"""The tower's pooling head, which the model does not use (`vision_use_head`)."""


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    return targets


def targets(name: str) -> list[Target]:
    """Our tensors for a stored one."""
    if vision := _VISION.match(name):
        ours = (vision[1] or "") + name[vision.end() :]
        return [] if ours.startswith(_HEAD) else [Target(ours)]
    return decoder_targets(name, "language_model." if name.startswith("language_model.") else "model.language_model.")
