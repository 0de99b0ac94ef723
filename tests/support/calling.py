"""A tiny model of random weights that can be made to call tools: a chat template with tools, and a schema that its
logits push against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from served import TEMPLATE, make_served

CALLING = TEMPLATE.replace(
    "{% for m in messages %}",
    "{{ 'SYSTEM' + (tools | tojson) if tools else '' }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "<tool_call><function={{ c.function.name }}>{{ c.function.arguments | tojson }}{% endfor %}", 1,
)  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 6}, "days": {"type": "integer", "maximum": 9999},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
}  # fmt: skip


def make_calling(path: Path) -> Path:
    """Writes the model; returns its folder."""
    model: Path = make_served(path).path
    (model / "chat_template.jinja").write_text(CALLING)
    return model
