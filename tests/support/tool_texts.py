"""Random texts with tool calls, whole and broken, and what must be true of them in any division."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from families.tool_calls import (
    CALL_LIST,
    HERMES,
    PYTHON_LINES,
    PYTHON_LIST,
    XML,
    CallPiece,
    CallScanner,
    Piece,
    TextPiece,
    ToolMarkup,
    calls_text,
)
from families.tool_literals import literal_text

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "options": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
Result = tuple[str, list[tuple[str, str]]]
"""The text, and names and arguments of the calls."""
MARKUPS = (XML, HERMES, CALL_LIST, PYTHON_LIST, PYTHON_LINES)


def joined(pieces: Sequence[Piece]) -> Result:
    text, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if isinstance(piece, TextPiece):
            text += piece.text
        elif piece.index == len(calls):
            assert piece.name
            calls.append((piece.name, piece.arguments))
        else:
            assert isinstance(piece, CallPiece) and piece.index == len(calls) - 1 and not piece.name
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return text, calls


def xml(name: str, **values: str) -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


def written(markup: ToolMarkup, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls with their markers."""
    if markup.body != "xml":
        return calls_text(markup, calls) or ""
    told = []
    for name, arguments in calls:
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        told.append(xml(name, **values))
    return "\n".join(told)


def random_json(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind < 6:
        return [None, True, rng.randint(-9, 9**9), rng.random(), _words(rng), ""][kind]
    if kind == 6:
        return [random_json(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {_words(rng): random_json(rng, depth - 1) for _ in range(rng.randrange(3))}


_WORDS = (
    "Köln", "写真", "😀", " ", "\n", '"', "\\", "<", ">", "</", "{", "}", "[", "]", ":", ",", "</parameter",
    "<tool_call>", "</tool_call>", "</function>", "<think>", "</think>", "\u2028", "\x00", "a", "12", "null", "e\u0301",
    "\U0010ffff",
)  # fmt: skip


def _words(rng: random.Random) -> str:
    return "".join(rng.choices(_WORDS, k=rng.randrange(4)))


def _call(rng: random.Random, markup: ToolMarkup) -> str:
    """A valid call; its values may look like markup."""
    name = rng.choice(["weather", "now"])
    if markup.body == "xml":
        values = {key: _words(rng) if key != "options" else json.dumps(random_json(rng)) for key in
                  rng.sample(["city", "days", "options", "note", "é"], rng.randrange(4))}  # fmt: skip
        return xml(name, **{key: value.replace("</parameter", "") for key, value in values.items()})
    space = rng.choice(["", "\n", " \n"])
    if markup.body in ("python", "lines"):
        calls = [_python_call(rng) for _ in range(rng.randint(1, 3))]
        between, around = (", ", "[]") if markup.body == "python" else ("\n", ("", ""))
        return f"{markup.begin}{space}{around[0]}{between.join(calls)}{around[1]}{space}{markup.end}"
    calls = []
    for _ in range(rng.randint(1, 3) if markup.body == "list" else 1):
        arguments = {_words(rng) or "a": random_json(rng) for _ in range(rng.randrange(3))}
        call = {"name": name, rng.choice(["arguments", "parameters"]): arguments}
        if rng.random() < 0.2:
            call = dict(reversed(call.items()))
        separators = rng.choice([(", ", ": "), (",", ":")])
        calls.append(json.dumps(call, ensure_ascii=rng.random() < 0.3, separators=separators))
    body = f"[{','.join(calls)}]" if markup.body == "list" else calls[0]
    return f"{markup.begin}{space}{body}{space}{markup.end}"


def _python_call(rng: random.Random) -> str:
    keys = rng.sample(["city", "days", "options", "note", "é"], rng.randrange(4))
    notation = rng.choice([repr, json.dumps, literal_text])
    arguments = [f"{key}={notation(random_json(rng))}" for key in keys]
    return f"{rng.choice(['weather', 'now'])}({', '.join(arguments)})"


_PIECES = (
    "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<function=", "weather", "now", ">", "</function>",
    "<parameter=", "city", "days", "</parameter>", "\n", " ", "text", "<think>", "</think>", '{"name": "weather"',
    ', "arguments": {"city": "', '"}', "}}", "[{", "<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>",
    "</function_calls>", "weather(", "city=", "'", "days=3", "[", ")]", "(1, 2)", "\\x4", "True",
)  # fmt: skip


def random_text(rng: random.Random) -> tuple[ToolMarkup, str]:
    """Valid calls, calls inside calls, pieces of markup, thinking, Unicode; about half of the texts are cut, have a
    character less or another call in their middle."""
    markup = rng.choice(MARKUPS)
    kinds = rng.choices(["call", "words", "piece", "other"], [4, 3, 3, 1], k=rng.randint(1, 8))
    parts = []
    for kind in kinds:
        match kind:
            case "call":
                parts.append(_call(rng, markup))
            case "words":
                parts.append(_words(rng))
            case "piece":
                parts.append(rng.choice(_PIECES))
            case _:
                parts.append(_call(rng, rng.choice(MARKUPS)))
    text = "".join(parts)
    at = rng.randrange(len(text) + 1)
    match rng.randrange(6):
        case 0:  # cut at a byte
            data = text.encode()
            text = data[: rng.randrange(len(data) + 1)].decode("utf-8", "replace")
        case 1:
            text = text[:at] + text[at + 1 :]
        case 2:
            text = text[:at] + _call(rng, markup) + text[at:]
    return markup, text


def check_text(rng: random.Random, markup: ToolMarkup, text: str) -> int:
    """Compares a parse of the whole with parses of random divisions and of single characters; returns the number of
    complete calls."""
    single = rng.random() < 0.2

    def scanned(parts: Sequence[str]) -> tuple[Result, int, int]:
        scanner = CallScanner(markup, TOOLS, single=single)
        pieces = [piece for part in parts for piece in scanner.feed(part)] + scanner.finish()
        return joined(pieces), scanner.complete, scanner.calls

    whole = scanned([text])
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 9)))
    for parts in ([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])], list(text)):
        assert scanned(parts) == whole, (markup, text)
    (rest, calls), complete, begun = whole
    assert len(calls) == begun and (not single or complete <= 1)
    parsed = 0
    for name, arguments in calls:
        assert name in TOOLS
        try:
            parsed += isinstance(json.loads(arguments), dict)
        except ValueError:
            pass  # it broke off
    assert parsed == complete, (markup, text)
    if not calls:
        assert rest == text, "nothing is lost"
    left = iter(text)
    assert all(letter in left for letter in rest), "text keeps its order"
    return complete
