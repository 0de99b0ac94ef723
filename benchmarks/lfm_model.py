"""A random LFM2-VL checkpoint of the released 450M model's exact shape, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.qwen_model import write_tokenizer

VOCAB = 65536
WORDS = 65400
"""Ids below this one are words. The released tokenizer's special tokens are among them; here they are above."""
MARKERS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|im_start|>", "<|im_end|>")
TILES = 10
"""Largest number of rows, and of columns, of an image's tiles."""
SPECIAL = dict(
    enumerate(
        (
            *MARKERS,
            *(f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(TILES) for column in range(TILES)),
        ),
        WORDS,
    )
)  # fmt: skip
IMAGE = (WORDS,)
"""Token ids that stand for an image in a prompt."""
ATTENTION = (2, 5, 8, 10, 12, 14)
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 6656,
    "block_ff_dim": 6656,
    "block_dim": 1024,
    "conv_dim": 1024,
    "conv_dim_out": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "layer_types": ["full_attention" if index in ATTENTION else "conv" for index in range(16)],
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "eos_token_id": WORDS + MARKERS.index("<|im_end|>"),
}
VISION: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_patches": 256,
    "patch_size": 16,
    "vision_use_head": False,
}
IMAGES: dict[str, Any] = {
    "image_processor_type": "Lfm2VlImageProcessorFast", "processor_class": "Lfm2VlProcessor", "downsample_factor": 2,
    "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True, "min_image_tokens": 64,
    "max_image_tokens": 256, "encoder_patch_size": 16, "tile_size": 512, "max_pixels_tolerance": 2.0,
    "do_resize": True, "resample": 2, "do_rescale": True, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip


def lfm_model(folder: Path) -> Path:
    """In bf16, 0.9 GB, with the released names of weights and a tokenizer of one word per id."""
    path = folder / "lfm2_vl-450m"
    if (path / "complete").exists():
        return path
    from transformers.models.lfm2_vl.configuration_lfm2_vl import Lfm2VlConfig
    from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlForConditionalGeneration

    torch.manual_seed(0)
    config = Lfm2VlConfig(
        text_config={"model_type": "lfm2", **TEXT}, vision_config={"model_type": "siglip2_vision_model", **VISION},
        image_token_id=IMAGE[0], projector_hidden_size=2048, projector_use_layernorm=False,
    )  # fmt: skip
    model: Any = Lfm2VlForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    file, saved, released = path / "model.safetensors", "model.vision_tower.", "model.vision_tower.vision_model."
    save_file({n.replace(saved, released, 1): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    (path / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=1))
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "Lfm2VlProcessor"}))
    write_tokenizer(path, VOCAB, SPECIAL)
    (path / "complete").touch()
    return path
