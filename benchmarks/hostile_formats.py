"""Formats that would exhaust the memory, the processor time or the stack of a server without limits."""

from __future__ import annotations

from typing import Any

import saccade


def _references(count: int) -> dict[str, Any]:
    """A chain of `$ref`s."""
    inner = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**inner, f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string", "pattern": "(ab|ba){50,100}"}
    for _ in range(levels):
        inner = {"type": "array", "minItems": 100, "items": inner}
    return inner


def _optional(count: int, prefix: str = "p") -> dict[str, Any]:
    properties = {f"{prefix}{i}": {"type": "integer"} for i in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


HOSTILE: dict[str, Any] = {
    "nested repetitions": saccade.Regex("(((a{1,1000}){1,1000}){1,1000})"),
    "any text 500 times": saccade.Regex("(.*a){500}"),
    "repetition of repetitions": saccade.Regex("(x+x+)+y"),
    "long repetition": saccade.Regex("[a-z]{1,100000}"),
    "optional letters": saccade.Regex("(a?){5000}a{5000}"),
    "exponential automaton": saccade.Regex("(a|b)*a(a|b){40}"),
    "classes of Unicode": saccade.Regex("(\\w|\\d|\\p{L}){0,3000}\\p{Lu}"),
    "large enum": {"enum": [f"value number {i}" for i in range(5500)]},
    "chain of references": _references(1000),
    "cycle of references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "alternatives of objects": {"anyOf": [_optional(12, f"p{i}_") for i in range(150)]},
    "optional properties": _optional(2000),
    "intersection of patterns": {"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefghijklmnop"]},
    "long string": {"type": "string", "minLength": 50_000, "maxLength": 100_000},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "nested arrays": _nested(4),
    "small steps": {"type": "number", "multipleOf": 1e-6, "minimum": -1e9, "maximum": 1e9},
    "large bounds": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "smallest integer": {"type": "integer", "const": -(2**63)},
    "remainders": {"anyOf": [{"type": "integer", "multipleOf": 65_537}, {"type": "integer", "multipleOf": 65_539}]},
    "ambiguous rules": saccade.Lark('start: a\na: a a | a a a | "x" | ""'),
    "left recursion": saccade.Lark('start: start start start | "a" | "aa" | "aaa"'),
    "exponential rules": saccade.Lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a" | "b"'
    ),
    "sequence of repetitions": saccade.Regex("x*" * 65_000),
    "terminals of terminals": saccade.Lark(
        'start: T17\nT0: "x"?\n' + "\n".join(f"T{i}: T{i - 1} T{i - 1}" for i in range(1, 18))
    ),
    "intersection of terminals": saccade.Lark("start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(24))),
    "simple patterns": {"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(64)]},
    "patterns of a property": {
        "allOf": [{"type": "object", "properties": {"p": {"type": "string", "pattern": f"a{i}"}}} for i in range(24)]
    },
    "many terminals": saccade.Lark(
        f"start: ({' | '.join(f'T{i}' for i in range(1500))})*\n"
        + "\n".join(f"T{i}: /(a|b|c){{{i % 50}}}x{i}.*/" for i in range(1500))
    ),
}
"""Formats by the construct that makes them expensive. Each request is served or ends with INVALID_ARGUMENT, and other
requests are hardly delayed."""
