"""Names of published weights -> our names. The tower and its mergers keep their published names without `model.`."""

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
        # With four times the tokens per image, the checkpoint has a window merger that is not used.
        return [] if ours.startswith("vision_tower.vit_merger.") and ours not in served else [Target(ours)]

    return targets
