"""A random tiny model whose tokenizer has markers of reasoning."""

from __future__ import annotations

import json
from pathlib import Path

from served import TEMPLATE, make_served

OPEN, CLOSE = 270, 271
"""Ids of the markers."""
_ASSISTANT = "<|im_start|>assistant\n"
_OPENING = (
    f"{_ASSISTANT}{{% if enable_thinking is not defined or enable_thinking %}}<think>{{% else %}}<think></think>"
    "{% endif %}"
)


def make_reasoner(path: Path) -> Path:
    """Writes a model directory for `saccade serve`, whose chat template begins reasoning."""
    make_served(path, vision=False)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for token, content in ((OPEN, "<think>"), (CLOSE, "</think>")):
        tokenizer["added_tokens"].append({"id": token, "content": content, **plain})
        tokenizer["model"]["vocab"][content] = token
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "chat_template.jinja").write_text(TEMPLATE.replace(_ASSISTANT, _OPENING))
    return path
