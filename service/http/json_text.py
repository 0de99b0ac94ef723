"""Writes the JSON of answers, without spaces."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def quoted(text: str) -> str:
    """A JSON string."""
    return encode_basestring(text)
