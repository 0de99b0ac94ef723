"""How deep the values of a JSON text are nested and how many there are, found without recursion."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

MAX_NESTING = 128
"""Maximum nesting of objects and arrays in a document, and in the JSON of an answer."""

MAX_VALUES = 2**21
"""Maximum number of values and keys in a document: the ids of a prompt of a million tokens, twice."""
MAX_CONTAINERS = 2**18
"""Maximum number of objects and arrays in a document. They take longer to make than other values."""

_BEFORE_VALUES = (b",", b":", b"[", b"{")
_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_OPENS = bytes.maketrans(_BRACKETS, b"\1\0\1\0")
_STEPS = (-1, 1)
_BLOCK = 2**14
"""Brackets that are counted at a time."""


def excessive_nesting(data: bytes, most: int) -> int:
    """How deep the objects and arrays of a JSON text in UTF-8 are nested, if that is more than `most`, or 0.

    To be called before `json.loads`, which recurses once for each level, up to Python's recursion limit. If a garbage
    collection started that deep, finalizers of other objects would exceed the limit, and their errors would be lost.
    """
    if data.count(b"[") + data.count(b"{") <= most:
        return 0
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    opens = b"".join(unescaped.split(b'"')[::2]).translate(_OPENS, _OTHERS)
    deepest = depth = 0
    for start in range(0, len(opens), _BLOCK):  # other threads wait while a block is counted
        depths = list(accumulate(map(_STEPS.__getitem__, opens[start : start + _BLOCK]), initial=depth))
        deepest, depth = max(deepest, max(depths)), depths[-1]
    return deepest if deepest > most else 0


def excessive_size(data: bytes, most_containers: int = MAX_CONTAINERS, most_values: int = MAX_VALUES) -> str:
    """What a JSON text in UTF-8 has too many of, with both numbers, or an empty text. Values and keys are counted by
    the characters before them, so that an empty object or array counts twice.

    To be called before `json.loads`, which holds the interpreter's lock while it makes all values: 3 s for 4 million
    arrays. They take up to 40 times the memory of their text.
    """
    if data.count(b"[") + data.count(b"{") <= most_containers and sum(map(data.count, _BEFORE_VALUES)) < most_values:
        return ""
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    values = unescaped.count(b'"') // 2
    if values <= most_values:  # else splitting it would take as much memory as parsing
        outside = b"".join(unescaped.split(b'"')[::2])
        if (containers := outside.count(b"[") + outside.count(b"{")) > most_containers:
            return f"{containers} objects and arrays; at most {most_containers} are allowed"
        values = 1 + sum(map(outside.count, _BEFORE_VALUES))
    return f"{values} values and keys; at most {most_values} are allowed" if values > most_values else ""


def answered_json(text: str) -> Any:
    """The value of JSON that a model has written. Raises ValueError, also if it is nested more than `MAX_NESTING`
    deep."""
    if depth := excessive_nesting(text.encode("utf-8", "surrogatepass"), MAX_NESTING):
        raise ValueError(f"the JSON is nested {depth} deep; at most {MAX_NESTING} are allowed")
    return json.loads(text)
