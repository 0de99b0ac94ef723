"""A random Qwen3.5 checkpoint of the released 0.8B model's exact shape, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = 248000
"""Ids below are words; the released tokenizer's special tokens lie above."""
VOCAB = 248320
SPECIAL = {
    248044: "<|endoftext|>", 248045: "<|im_start|>", 248046: "<|im_end|>", 248053: "<|vision_start|>",
    248054: "<|vision_end|>", 248055: "<|vision_pad|>", 248056: "<|image_pad|>", 248057: "<|video_pad|>",
}  # fmt: skip
IMAGE = (248053, 248056, 248054)
"""What stands in a prompt for an image."""
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
    "layer_types": ["full_attention" if (index + 1) % 4 == 0 else "linear_attention" for index in range(24)],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
    "eos_token_id": 248044,
    "tie_word_embeddings": True,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "num_position_embeddings": 2304,
    "out_hidden_size": 1024,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}
NUMBERS = {
    "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5], "processor_class": "Qwen3VLProcessor",
}  # fmt: skip
IMAGES = NUMBERS | {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEOS = NUMBERS | {
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    "video_processor_type": "Qwen3VLVideoProcessor",
}


def qwen_model(folder: Path) -> Path:
    """In bf16, 1.7 GB, with a tokenizer of a word for each id."""
    path = folder / "qwen3_5-0.8b"
    if (path / "complete").exists():
        return path
    from transformers import Qwen3_5ForConditionalGeneration
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

    torch.manual_seed(0)
    config = Qwen3_5Config(
        text_config=TEXT, vision_config=VISION, tie_word_embeddings=True, vision_start_token_id=IMAGE[0],
        image_token_id=IMAGE[1], vision_end_token_id=IMAGE[2], video_token_id=248057,
    )  # fmt: skip
    model: Any = Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=1))
    (path / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS, indent=1))
    _write_tokenizer(path)
    (path / "complete").touch()
    return path


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {SPECIAL.get(index, f"w{index}"): index for index in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL.values()])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "unk_token": "w0"})
    )
