"""Random Qwen3.5 checkpoints, written by transformers: of the released 0.8B model's exact shape, and a small one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = 248000
"""Ids below this one are words; the released tokenizer's special tokens are above."""
VOCAB = 248320
SPECIAL = {
    248044: "<|endoftext|>", 248045: "<|im_start|>", 248046: "<|im_end|>", 248053: "<|vision_start|>",
    248054: "<|vision_end|>", 248055: "<|vision_pad|>", 248056: "<|image_pad|>", 248057: "<|video_pad|>",
}  # fmt: skip
IMAGE = (248053, 248056, 248054)
"""Token ids that stand for an image in a prompt."""
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


SMALL_WORDS = 31990
SMALL_IMAGE = (31990, 31991, 31992)
SMALL_SPECIAL = dict(
    enumerate(
        ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"), 31990
    )
)
SMALL_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|> w1 ' + message.content + ' <|im_end|> w2 ' }}
{%- endfor -%}
{{ '<|im_start|> w3 ' }}"""
SMALL_TEXT: dict[str, Any] = TEXT | {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "layer_types": TEXT["layer_types"][:8],
    "num_attention_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "eos_token_id": 2,
}
SMALL_VISION: dict[str, Any] = VISION | {
    "depth": 6, "hidden_size": 384, "intermediate_size": 1536, "num_heads": 6, "out_hidden_size": 512
}  # fmt: skip


def small_qwen_model(folder: Path) -> Path:
    """In bf16, 63 M parameters, with a tokenizer of one word per id and a chat template."""
    path = _write(folder / "qwen3_5-small", SMALL_TEXT, SMALL_VISION, SMALL_IMAGE, 31993)
    if not (path / "tokenizer.json").exists():
        write_tokenizer(path, 32000, SMALL_SPECIAL)
        (path / "chat_template.jinja").write_text(SMALL_TEMPLATE)
    return path


def tiny_qwen_model(folder: Path) -> Path:
    """In bf16, with the released image settings but at most 1,024 tokens per image: for workloads that are dominated by
    preparing images."""
    text = SMALL_TEXT | {
        "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2, "num_key_value_heads": 1,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [2, 1, 1]},
    }  # fmt: skip
    vision = VISION | {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 1, "out_hidden_size": 64}
    path = _write(folder / "qwen3_5-tiny", text, vision, SMALL_IMAGE, 31993)
    settings = IMAGES | {"size": {"shortest_edge": 65536, "longest_edge": 1024 * 32 * 32}}
    (path / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))
    if not (path / "tokenizer.json").exists():
        write_tokenizer(path, 32000, SMALL_SPECIAL)
    return path


def qwen_model(folder: Path) -> Path:
    """In bf16, 1.7 GB, with a tokenizer of one word per id."""
    path = _write(folder / "qwen3_5-0.8b", TEXT, VISION, IMAGE, 248057)
    if not (path / "tokenizer.json").exists():
        write_tokenizer(path, VOCAB, SPECIAL)
    return path


def _write(path: Path, text: dict[str, Any], vision: dict[str, Any], image: tuple[int, int, int], video: int) -> Path:
    if (path / "complete").exists():
        return path
    from transformers import Qwen3_5ForConditionalGeneration
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

    torch.manual_seed(0)
    config = Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=True, vision_start_token_id=image[0],
        image_token_id=image[1], vision_end_token_id=image[2], video_token_id=video,
    )  # fmt: skip
    model: Any = Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=1))
    (path / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS, indent=1))
    (path / "complete").touch()
    return path


def write_tokenizer(path: Path, vocab: int, special: dict[int, str]) -> None:
    """Writes a tokenizer of one word per id. `special`: the words of special tokens by their ids."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {special.get(index, f"w{index}"): index for index in range(vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special.values()])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "unk_token": "w0"})
    )
