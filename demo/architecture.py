"""Shape of the demo model: its configuration in the published layout, and preprocessing by the released image rule."""

import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from transformers import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config

from demo.tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, IMAGE_ID, PAD_ID, VOCAB_SIZE, tokenizer_config

PATCH = 8
MIN_PATCHES, MAX_PATCHES = 16, 256
IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
PATTERN = "M*EM-M*EM-"
TIME_STEPS = (0.001, 0.1)
"""Mamba's step sizes at initialisation are spread over this range."""


def model_config() -> NemotronH_Omni_Reasoning_V3_Config:
    """The configuration as `config.json` holds it."""
    hidden, vision_hidden = 192, 160
    return NemotronH_Omni_Reasoning_V3_Config(
        text_config={
            "model_type": "nemotron_h",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "hybrid_override_pattern": PATTERN,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 512,
            "mamba_num_heads": 6,
            "mamba_head_dim": 64,
            "ssm_state_size": 32,
            "n_groups": 2,
            "expand": 2,
            "conv_kernel": 4,
            "chunk_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 192,
            "moe_shared_expert_intermediate_size": 384,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "time_step_min": 1e-9,
            "time_step_max": TIME_STEPS[1],
            "num_nextn_predict_layers": 1,
            "mtp_hybrid_override_pattern": "*E",
            "max_position_embeddings": 4096,
            "pad_token_id": PAD_ID,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
        },
        vision_config={
            "model_type": "radio",
            "hidden_size": vision_hidden,
            "num_hidden_layers": 4,
            "num_attention_heads": 5,
            "mlp_ratio": 4.0,
            "patch_size": PATCH,
            "image_size": 128,
            "max_img_size": 256,
            "num_cls_tokens": 2,
            "num_registers": 2,
            "video_temporal_patch_size": 2,
            "norm_mean": list(IMAGE_MEAN),
            "norm_std": list(IMAGE_STD),
        },
        audio_config=None,
        force_image_size=128,
        downsample_ratio=0.5,
        projector_hidden_size=512,
        vision_hidden_size=vision_hidden,
        image_token_id=IMAGE_ID,
    )


def new_model(seed: int) -> NemotronH_Omni_Reasoning_V3:
    """A randomly initialised fp32 model; the vision norm of the multi-token prediction layout stays the identity."""
    torch.manual_seed(seed)
    model = NemotronH_Omni_Reasoning_V3(model_config())
    low, high = (math.log(step) for step in TIME_STEPS)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.exp(torch.rand(parameter.shape) * (high - low) + low)
            parameter.data = step + torch.log(-torch.expm1(-step))
        elif name.startswith("vision_final_layernorm"):
            parameter.requires_grad_(False)
    return model


# Preprocessing -------------------------------------------------------------------------------------------------------


def patch_grid(height: int, width: int) -> tuple[int, int]:
    """Patch grid (rows, columns) of a picture of `height` x `width` pixels, by the released processor's rule."""
    rows, columns = round(height / PATCH + 0.5), round(width / PATCH + 0.5)
    shrink = min(math.sqrt(MAX_PATCHES / (rows * columns)), 1.0)
    rows, columns = math.floor(shrink * rows), math.floor(shrink * columns)
    if rows * columns < MIN_PATCHES:
        grow = math.sqrt(MIN_PATCHES / (rows * columns))
        rows, columns = math.ceil(grow * rows), math.ceil(grow * columns)
    if rows % 2:
        rows = rows + 1 if (rows + 1) * columns <= MAX_PATCHES else max(2, rows - 1)
    if columns % 2:
        columns = columns + 1 if rows * (columns + 1) <= MAX_PATCHES else max(2, columns - 1)
    return rows, columns


def pixel_values(images: list[Image.Image], grid: tuple[int, int]) -> torch.Tensor:
    """`[B, 3, rows x 8, columns x 8]` fp32, normalised, of pictures that share one patch grid."""
    size = (grid[0] * PATCH, grid[1] * PATCH)
    pixels = []
    for image in images:
        tensor = torch.from_numpy(np.array(image.convert("RGB"), dtype=np.float32)).permute(2, 0, 1)[None]
        if tensor.shape[-2:] != size:
            tensor = F.interpolate(tensor, size, mode="bicubic", antialias=True, align_corners=False)
        pixels.append(tensor)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGE_MEAN, IMAGE_STD))
    return (torch.cat(pixels) / 255 - mean) / std


# The published directory ---------------------------------------------------------------------------------------------


def export(model: NemotronH_Omni_Reasoning_V3, tokenizer: Tokenizer, path: Path) -> None:
    """Writes `model` in bf16 to directory `path` in the published Hugging Face layout."""
    path.mkdir(parents=True, exist_ok=True)
    copy = NemotronH_Omni_Reasoning_V3(model_config())
    copy.load_state_dict(model.state_dict())
    copy.bfloat16()
    for name, buffer in model.named_buffers():
        # fp32 as in released checkpoints: it decides between experts with nearly equal scores
        if name.endswith("e_score_correction_bias"):
            copy.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = buffer.clone()
    copy.generation_config.update(do_sample=False, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    copy.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    preprocessor = {
        "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
        "processor_class": "NemotronH_Omni_Reasoning_V3Processor",
        "patch_size": PATCH,
        "downsample_ratio": 0.5,
        "min_num_patches": MIN_PATCHES,
        "max_num_patches": MAX_PATCHES,
        "max_model_len": 4096,
        "norm_mean": list(IMAGE_MEAN),
        "norm_std": list(IMAGE_STD),
    }
    for name, content in {
        "preprocessor_config.json": preprocessor,
        "tokenizer_config.json": tokenizer_config(),
    }.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
