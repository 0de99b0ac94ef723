"""Random tiny towers: transformers' own model as the oracle, and its weights under the names that our runner uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import NemotronHConfig, RadioConfig
from transformers.models.nemotron_h_omni.configuration_nemotron_h_omni import NemotronH_Omni_Reasoning_V3_Config
from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

from encoder.item import EncoderItem
from families.nemotron_h_omni.vision import RadioVision

VISION_PREFIXES = (
    "vision_model.embeddings.",
    "vision_model.encoder.",
    "vision_final_layernorm.",
    "multi_modal_projector.",
)


@dataclass(frozen=True)
class TinyTower:
    """The oracle, and our runner's inputs for the same weights."""

    oracle: NemotronH_Omni_Reasoning_V3
    config: RadioVision
    weights: dict[str, Tensor]

    @torch.no_grad()
    def features(self, images: Sequence[EncoderItem]) -> list[Tensor]:
        """transformers' rows of each image, all packed in one call."""
        grids = torch.tensor([image.grid for image in images])
        patches = torch.cat([image.patches.to(self.oracle.dtype) for image in images])
        return list(self.oracle.get_image_features(patches, grids).pooler_output)


def tiny_tower(seed: int = 0, *, dtype: torch.dtype = torch.float32, **changes: Any) -> TinyTower:
    """A tower of a few layers in which every weight is random, including norms and layer scales.

    `changes`: RadioConfig fields, and `final_layernorm`, `projector_hidden_size`, `text_hidden_size`.
    """
    final_layernorm = changes.pop("final_layernorm", False)
    projector = changes.pop("projector_hidden_size", 56)
    text_hidden = changes.pop("text_hidden_size", 40)
    radio = RadioConfig(
        **{
            "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "mlp_ratio": 2.0, "patch_size": 4,
            "max_img_size": 40, "num_cls_tokens": 2, "num_registers": 3, "video_temporal_patch_size": 2, **changes,
        }
    )  # fmt: skip
    text = NemotronHConfig(
        hidden_size=text_hidden, vocab_size=32, num_hidden_layers=1, layers_block_type=["mlp"], intermediate_size=16,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_nextn_predict_layers=int(final_layernorm),
        mamba_num_heads=2, mamba_head_dim=4, n_groups=1, ssm_state_size=4,
    )  # fmt: skip
    config = NemotronH_Omni_Reasoning_V3_Config(
        vision_config=radio.to_dict(), text_config=text.to_dict(), projector_hidden_size=projector,
        vision_hidden_size=radio.hidden_size, video_temporal_patch_size=radio.video_temporal_patch_size,
        image_token_id=3,
    )  # fmt: skip
    config.vision_config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    oracle = NemotronH_Omni_Reasoning_V3(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            matrix = weight.dim() == 2 and not name.endswith("cls_register_token")
            around_one = "norm" in name and name.endswith("weight") or "lambda1" in name
            weight.copy_(noise * weight.shape[-1] ** -0.5 if matrix else 0.3 * noise + float(around_one))
    oracle = oracle.to(dtype)
    weights = {k: v for k, v in oracle.state_dict().items() if k.startswith(VISION_PREFIXES)}
    return TinyTower(oracle, vision_config(radio, text_hidden, projector, final_layernorm), weights)


def vision_config(radio: RadioConfig, text_hidden: int, projector: int, final_layernorm: bool) -> RadioVision:
    mlp = int(radio.hidden_size * radio.mlp_ratio)
    return RadioVision(
        hidden_size=radio.hidden_size,
        num_layers=radio.num_hidden_layers,
        num_heads=radio.num_attention_heads,
        intermediate_size=RadioVision.swiglu_size(mlp) if radio.use_swiglu_ffn else mlp,
        hidden_act=radio.hidden_act,
        use_swiglu_ffn=radio.use_swiglu_ffn,
        qkv_bias=radio.qkv_bias,
        layer_norm_eps=radio.layer_norm_eps,
        layerscale_value=radio.layerscale_value,
        patch_size=radio.patch_size,
        max_img_size=radio.max_img_size,
        num_cls_tokens=radio.num_cls_tokens,
        num_registers=radio.num_registers,
        video_temporal_patch_size=radio.video_temporal_patch_size,
        min_num_patches=16,
        max_num_patches=256,
        max_model_len=512,
        projector_hidden_size=projector,
        text_hidden_size=text_hidden,
        final_layernorm=final_layernorm,
    )


def random_image(config: RadioVision, rows: int, columns: int, seed: int = 0) -> EncoderItem:
    """Patches of a `rows` x `columns` grid, float32."""
    generator = torch.Generator().manual_seed(1000 * rows + columns + 7919 * seed)
    return EncoderItem((rows, columns), torch.randn(rows * columns, config.patch_dim, generator=generator))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest absolute difference divided by the largest value."""
    scale = expected.double().abs().max()
    return float((got.double() - expected.double()).abs().max() / scale)
