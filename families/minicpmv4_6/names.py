"""Names of published weights -> ours. Those of the tower and its mergers are ours but for `model.` before them."""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target
from families.qwen3_5.names import decoder_targets

_VISION = re.compile(r"^(model\.)?(?=vision_tower\.|merger\.)")


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    served = config.vision.expected_weights() if config.vision is not None else {}

    def targets(name: str) -> list[Target]:
        if _VISION.match(name) is None:
            return decoder_targets(name, config.decoder)
        ours = _VISION.sub("", name)
        # The window merger is there, and is not used, where each image has four times the tokens.
        return [] if ours.startswith("vision_tower.vit_merger.") and ours not in served else [Target(ours)]

    return targets
