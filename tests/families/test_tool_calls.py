"""The scanner of tool calls: calls of each markup, and any text in any division."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from families.tool_calls import CALL_LIST, HERMES, XML, CallScanner, Piece, TextPiece, ToolMarkup

TOOLS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
Result = tuple[str, list[tuple[str, str]]]


def joined(pieces: list[Piece]) -> Result:
    text, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        if isinstance(piece, TextPiece):
            text += piece.text
        elif piece.index == len(calls):
            assert piece.name
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1 and not piece.name
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return text, calls


def scanned(markup: ToolMarkup, *parts: str) -> Result:
    scanner, pieces = CallScanner(markup, TOOLS), list[Piece]()
    for part in parts:
        pieces += scanner.feed(part)
    return joined(pieces + scanner.finish())


def xml(name: str, **values: str) -> str:
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


WEATHER = '{"name": "weather", "arguments": {"city": "Köln </tool_call>", "days": 2}}'


@pytest.mark.parametrize(
    ("markup", "text", "rest", "calls"),
    [
        (XML, f"So. {xml('weather', city='12', days='2')}\n{xml('now')}", "So. \n",
         [("weather", {"city": "12", "days": 2}), ("now", {})]),
        (XML, xml("weather", city='a\n"<b>"'), "", [("weather", {"city": 'a\n"<b>"'})]),
        (XML, xml("other", city="a"), xml("other", city="a"), []),
        (XML, f"<tool_call>{xml('now')}", "<tool_call>", [("now", {})]),
        (XML, "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\nso</tool_call>",
         "\nso</tool_call>", [("weather", {"days": 2})]),
        (XML, "<tool_call>\n<function=now>\n</function>\n", "\n", [("now", {})]),
        (HERMES, f"a<tool_call>\n{WEATHER}\n</tool_call>b", "ab",
         [("weather", {"city": "Köln </tool_call>", "days": 2})]),
        (HERMES, "<tool_call>{'name': 'now'}</tool_call>", "<tool_call>{'name': 'now'}</tool_call>", []),
        (CALL_LIST, f'<TOOLCALL>[{WEATHER}, {{"name": "now"}}]</TOOLCALL>', "",
         [("weather", {"city": "Köln </tool_call>", "days": 2}), ("now", {})]),
        (CALL_LIST, "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
    ],
)  # fmt: skip
def test_calls_and_the_text_around_them(markup: ToolMarkup, text: str, rest: str, calls: list[tuple[str, Any]]) -> None:
    found = scanned(markup, text)
    assert found[0] == rest and [(name, json.loads(arguments)) for name, arguments in found[1]] == calls


PIECES = (
    "<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<function=", "weather", "now", ">", "</function>",
    "<parameter=", "city", "days", "</parameter>", "\n", " ", "写真", "😀",
    "<", "{", "}", "[", "]", '"', ":", ",", "\\",
    WEATHER, f"[{WEATHER}]", xml("weather", city="é"), xml("now"), f"<tool_call>{WEATHER}</tool_call>", "</think>",
    f"<TOOLCALL>[{WEATHER}]</TOOLCALL>", "text", "2",
)  # fmt: skip


def fuzzed(count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        markup = rng.choice([XML, HERMES, CALL_LIST])
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 14)))
        if rng.random() < 0.4:
            text = text[: rng.randrange(len(text) + 1)]
        whole = scanned(markup, text)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert scanned(markup, *parts) == whole == scanned(markup, *text), text
        for name, arguments in whole[1]:
            assert name in TOOLS and isinstance(json.loads(arguments), dict), text
        if not whole[1]:
            assert whole[0] == text, "nothing is lost"
        left = iter(text)
        assert all(letter in left for letter in whole[0]), "text keeps its order"


def test_any_text_in_any_division_gives_the_same() -> None:
    fuzzed(1500)
