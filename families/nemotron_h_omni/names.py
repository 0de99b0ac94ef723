"""Maps names of published weights to the server's names.

NVIDIA's releases (and, by default, transformers' `save_pretrained`) have `vision_model.radio_model.model.blocks.0...`
and `mlp1.1...`; transformers' modules have `vision_model.encoder.layer.0...`, and so does the server.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from families.family import FamilyConfig, Target
from families.nemotron_h.names import decoder_targets

# Not used: audio weights, and buffers that follow from the configuration.
_NOT_SERVED = re.compile(
    r"^(language_model\.)?(sound_encoder\.|sound_projection\.|audio_tower\.|embed_audio\.)"
    r"|\.input_conditioner\.|(^|\.)summary_idxs$"
)
_PATCHES = r"^vision_model\.radio_model\.model\.patch_generator\."
_RENAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."),
        (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
        (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
        (r"^vision_projector\.vision_final_layernorm\.", "vision_final_layernorm."),
        (_PATCHES + r"video_embedder\.", "vision_model.embeddings.video_patch_projection."),
        (_PATCHES + r"embedder\.", "vision_model.embeddings.patch_projection."),
        (_PATCHES + r"pos_embed$", "vision_model.embeddings.position_embedding"),
        (_PATCHES + r"cls_token\.token$", "vision_model.embeddings.cls_register_token"),
        (r"^vision_model\.radio_model\.model\.blocks\.", "vision_model.encoder.layer."),
        (r"(^vision_model\..*)\.attn\.proj\.", r"\1.attention.o_proj."),
        (r"(^vision_model\..*)\.ls([12])\.gamma$", r"\1.layer_scale\2.lambda1"),
    )
)
_FUSED_QKV = re.compile(r"^(vision_model\..*)\.attn\.qkv\.(weight|bias)$")


def weights(config: FamilyConfig) -> Callable[[str], list[Target]]:
    has_mtp = bool(config.decoder.mtp)

    def targets(name: str) -> list[Target]:
        if _NOT_SERVED.search(name):
            return []
        for pattern, replacement in _RENAMES:
            name = pattern.sub(replacement, name)
        if fused := _FUSED_QKV.match(name):
            layer, suffix = fused.groups()
            return [Target(f"{layer}.attention.{part}_proj.{suffix}", "part", i, 3) for i, part in enumerate("qkv")]
        return decoder_targets(name, has_mtp)

    return targets
