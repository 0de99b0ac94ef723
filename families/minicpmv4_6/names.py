"""Maps names of published weights to the server's names. The tower and its mergers only lose the prefix `model.`."""

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
        # With downsample_mode "4x" (four times the tokens per image), the checkpoint's window merger is not used.
        return [] if ours.startswith("vision_tower.vit_merger.") and ours not in served else [Target(ours)]

    return targets
