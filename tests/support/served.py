"""A random tiny model that can be served: checkpoint, byte-level tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_checkpoint import TinyCheckpoint, make_checkpoint
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

SPECIAL = ["<pad>", "<s>", "<|im_end|>", "<image>", "<img>", "</img>", "<|im_start|>"]
IMAGE_TOKEN = SPECIAL.index("<image>")
VOCAB = 288  # 256 bytes, the special tokens, and some ids that no tokenizer entry has
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_byte_tokenizer(path: Path) -> None:
    """One token per byte after the special tokens, so that characters can be split in every way."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    raw = RawTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    raw.save(str(path))


def make_served(
    path: Path, seed: int = 11, *, vision: bool = True, text: dict[str, Any] | None = None
) -> TinyCheckpoint:
    """Writes a model directory for `saccade serve`."""
    shape = {"vocab_size": VOCAB, "pattern": "ME*-M", "max_position_embeddings": 1024, **(text or {})}
    tiny = make_checkpoint(path, seed, vision=vision, text=shape, image_token=IMAGE_TOKEN)
    save_byte_tokenizer(path / "tokenizer.json")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return tiny
