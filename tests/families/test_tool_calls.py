"""The scanner of tool calls: calls of each markup, and any text in any division."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tool_texts import MARKUPS, TOOLS, check_text, joined, random_text, written, xml

from families.tool_calls import CALL_LIST, HERMES, PYTHON_LINES, PYTHON_LIST, XML, CallScanner, TextPiece, ToolMarkup
from families.tool_values import typed

CITY = "Köln </tool_call>"
WEATHER = json.dumps({"name": "weather", "arguments": {"city": CITY, "days": 2}}, ensure_ascii=False)
FOUND = ("weather", {"city": CITY, "days": 2})


def scanned(markup: ToolMarkup, text: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    scanner = CallScanner(markup, TOOLS, **options)
    return joined(scanner.feed(text) + scanner.finish())


@pytest.mark.parametrize(
    ("markup", "text", "rest", "calls"),
    [
        (XML, f"So. \n{xml('weather', city='12', days='2')}\n{xml('now')}\n", "So.",
         [("weather", {"city": "12", "days": 2}), ("now", {})]),
        (XML, xml("weather", city='a\n"<b>"\\'), "", [("weather", {"city": 'a\n"<b>"\\'})]),
        (XML, xml("weather", city="\n\na\n"), "", [("weather", {"city": "\n\na\n"})]),
        (XML, "<tool_call><function= now ></function></tool_call> so\n", " so\n", [("now", {})]),
        (XML, xml("other", city="a"), xml("other", city="a"), []),
        (XML, f" \n<tool_call>{xml('now')}", " \n<tool_call>", [("now", {})]),
        (XML, "<tool_call>\n<function=now>\n</function>\n", "", [("now", {})]),
        (XML, "<tool_call>\n<function=now>\n</function>\nso", "\nso", [("now", {})]),
        (HERMES, f"a <tool_call>\n{WEATHER}\n</tool_call>b", "ab", [FOUND]),
        (HERMES, "<tool_call>{'name': 'now'}</tool_call>", "<tool_call>{'name': 'now'}</tool_call>", []),
        (HERMES, '<tool_call>{"arguments": {"city": "é"}, "name": "weather"}</tool_call>', "",
         [("weather", {"city": "é"})]),
        (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        (HERMES, huge := '<tool_call>{"arguments": {"days": 1e999}, "name": "weather"}</tool_call>', huge, []),
        (HERMES, huge := '<tool_call>{"name": "now", "arguments": "{\\"days\\": 1e999}"}</tool_call>', huge, []),
        (HERMES, '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>', "",
         [("weather", {"days": 1})]),
        (HERMES, deep := f'<tool_call>{{"name": "now", "arguments": "{"[" * 900 + "]" * 900}"}}</tool_call>', deep, []),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": [1, {"b": null}], "c": "\\ud83d\\u00e9"}}'
                 "</tool_call>", "", [("weather", {"a": [1, {"b": None}], "c": "\ud83dé"})]),
        (HERMES, '<tool_call>{"name": "now", "arguments": {}, "id": 3}</tool_call>', ', "id": 3}</tool_call>',
         [("now", {})]),
        (CALL_LIST, f'<TOOLCALL>[{WEATHER}, {{"name": "now"}}]</TOOLCALL>', "", [FOUND, ("now", {})]),
        (CALL_LIST, f'<TOOLCALL>[{WEATHER}, {{"name": "other"}}]</TOOLCALL>', ', {"name": "other"}]</TOOLCALL>',
         [FOUND]),
        (HERMES, f"<tool_call>\n[\n  {WEATHER},\n  {WEATHER}\n]\n</tool_call>", "", [FOUND] * 2),
        (CALL_LIST, f"<TOOLCALL>{WEATHER}</TOOLCALL>", "", [FOUND]),
        (CALL_LIST, "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
        (CALL_LIST, "<TOOLCALL>[[1]]</TOOLCALL>", "<TOOLCALL>[[1]]</TOOLCALL>", []),
        (PYTHON_LIST, 'So. <|tool_call_start|>[weather(city="Köln", days=2), now()]<|tool_call_end|>Wait.', "So.Wait.",
         [("weather", {"city": "Köln", "days": 2}), ("now", {})]),
        (PYTHON_LIST, "<|tool_call_start|>[weather(days=2,), now(),\n]<|tool_call_end|>", "",
         [("weather", {"days": 2}), ("now", {})]),
        (PYTHON_LIST, "<|tool_call_start|>[now(),,]<|tool_call_end|>", ",,]<|tool_call_end|>", [("now", {})]),
        (PYTHON_LIST, "<|tool_call_start|>\n[ weather ( city = 'a' , from=1,user-id=2, ) ]\n<|tool_call_end|>", "",
         [("weather", {"city": "a", "from": 1, "user-id": 2})]),
        (PYTHON_LIST, "<|tool_call_start|>now()<|tool_call_end|>", "", [("now", {})]),
        (PYTHON_LIST, f"<|tool_call_start|>[{WEATHER}, now()]<|tool_call_end|>", "", [FOUND, ("now", {})]),
        (PYTHON_LIST, f"<|tool_call_start|>{WEATHER}<|tool_call_end|>", "", [FOUND]),
        *((PYTHON_LIST, text, text, []) for text in (
            "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[weather('Rome')]<|tool_call_end|>",
            "<|tool_call_start|>[weather(**{'city': 1})]<|tool_call_end|>",
            "<|tool_call_start|>[a.now()]<|tool_call_end|>", "<|tool_call_start|>[weather(3)]<|tool_call_end|>",
            "[now()]", "<|tool_call_start|>x = [now()]<|tool_call_end|>",
        )),
        (PYTHON_LIST, "<|tool_call_start|>[now(), other()]<|tool_call_end|>", ", other()]<|tool_call_end|>",
         [("now", {})]),
        (PYTHON_LINES, "So.\n<function_calls>\nweather(city=\"a\\nb\", note=null)\nnow()\n</function_calls>", "So.",
         [("weather", {"city": "a\nb", "note": None}), ("now", {})]),
        (PYTHON_LINES, "<function_calls>now()now()</function_calls>", "", [("now", {})] * 2),
        (PYTHON_LINES, none := "<function_calls></function_calls>", none, []),
        (PYTHON_LINES, none := "<function_calls>[now()]</function_calls>", none, []),
    ],
)  # fmt: skip
def test_calls_and_the_text_around_them(markup: ToolMarkup, text: str, rest: str, calls: list[tuple[str, Any]]) -> None:
    found = scanned(markup, text)
    assert found[0] == rest and [(name, json.loads(arguments)) for name, arguments in found[1]] == calls


@pytest.mark.parametrize(
    ("markup", "text", "rest", "arguments"),
    [
        (XML, "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\nso</tool_call>", "\nso</tool_call>",
         '{"days": 2'),
        (XML, "<tool_call>\n<function=weather>\n<parameter=city>\nKö\n</par", "\n</par", '{"city": "Kö'),
        (XML, "<tool_call>\n<function=weather>\n<parameter=days>\n2", "<parameter=days>\n2", "{"),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "a\\u00', "\\u00", '{"city": "a'),
        (HERMES, '<tool_call>{"name": "weather", "arguments": {"days": 01}}', "01}}", '{"days": '),
        (PYTHON_LIST, "<|tool_call_start|>[weather(city='K\\u00", "\\u00", '{"city": "K'),
        (PYTHON_LIST, "<|tool_call_start|>[weather(days=2, 'x')]", ", 'x')]", '{"days": 2'),
        (PYTHON_LIST, "<|tool_call_start|>[weather(days=2, days=3)]", ", days=3)]", '{"days": 2'),
        (PYTHON_LIST, "<|tool_call_start|>[weather(days=[1, x])]", "x])]", '{"days": [1, '),
        (PYTHON_LINES, "<function_calls>weather(days=", "", '{"days": '),
    ],
)  # fmt: skip
def test_a_call_that_breaks_off_stays_incomplete(markup: ToolMarkup, text: str, rest: str, arguments: str) -> None:
    """No caller should take it for a complete one."""
    scanner = CallScanner(markup, TOOLS)
    found = joined(scanner.feed(text) + scanner.finish())
    assert scanner.pending and not scanner.complete
    assert found[1] == [("weather", arguments)] and found[0].strip() == rest.strip()


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_a_call_that_is_cut_off_leaves_no_markup(markup: ToolMarkup) -> None:
    """Wherever it is, and however the text arrives."""
    call = f"so{written(markup, ('weather', {'city': 'Oslo', 'days': 2}))}"
    for end in range(len(f"so{markup.begin}"), len(call)):
        for parts in ([call[:end]], list(call[:end])):
            scanner = CallScanner(markup, TOOLS)
            pieces = [piece for part in parts for piece in scanner.feed(part)]
            text, calls = joined(pieces + scanner.finish(cut=True))
            assert text == "so" and [name for name, _ in calls] in ([], ["weather"])
    for begun in (f"\n{markup.begin}"[:end] for end in range(1, len(markup.begin) + 1)):
        for only, rest in ((True, ""), (False, begun)):
            scanner = CallScanner(markup, TOOLS, only=only)
            assert joined(scanner.feed(begun) + scanner.finish(cut=True)) == (rest, [])
            scanner = CallScanner(markup, TOOLS, only=only)
            assert joined(scanner.feed(begun) + scanner.finish()) == (begun, []), "the model has ended there"
    malformed = {
        "xml": " is how it begins", "object": '{"name": "a\\q', "list": '[{"name": "a\\q', "python": '[weather("',
        "lines": 'weather("',
    }[markup.body]  # fmt: skip
    for other in (f"so {markup.begin} is how it begins", f"so {markup.begin}{malformed}", "so <b"):
        scanner = CallScanner(markup, TOOLS)
        assert joined(scanner.feed(other) + scanner.finish(cut=True)) == (other, [])


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_arguments_are_reported_as_they_are_written(markup: ToolMarkup) -> None:
    long = "so " * 100
    call = written(markup, ("weather", {"city": long})).removesuffix(markup.end)
    scanner = CallScanner(markup, TOOLS)
    pieces = [piece for letter in call for piece in scanner.feed(letter)]
    assert len(pieces) > 250, "nearly every character is reported when it is known"
    assert json.loads(joined(pieces)[1][0][1]) == {"city": long} and scanner.complete == 1


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_after_a_single_call_the_answer_is_over(markup: ToolMarkup) -> None:
    call = written(markup, ("now", {}), ("now", {}))
    scanner = CallScanner(markup, TOOLS, single=True)
    assert joined(scanner.feed("a" + call[:9])) == ("a", []) and not scanner.done
    assert joined(scanner.feed(f"{call[9:]} b {call}") + scanner.finish()) == ("", [("now", "{}")])
    assert scanner.done and not scanner.pending


@pytest.mark.parametrize("markup", MARKUPS, ids=lambda markup: markup.body)
def test_where_a_call_begins_at_once_or_never_a_later_one_is_text(markup: ToolMarkup) -> None:
    call = written(markup, ("now", {}))
    for text, rest, calls in (
        (f'{{"a": "{call}"}}', f'{{"a": "{call}"}}', []), (f" {call}", f" {call}", []), (call[:5], call[:5], []),
        (f"{call}\n{call}", "", [("now", "{}")] * 2), (call, "", [("now", "{}")]),
    ):  # fmt: skip
        for parts in ([text], list(text)):
            scanner = CallScanner(markup, TOOLS, at_once=True)
            pieces = [piece for part in parts for piece in scanner.feed(part)]
            assert joined(pieces + scanner.finish()) == (rest, calls), text


SCHEMA = {
    "properties": {
        "text": {"type": "string"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"}, "share": {"type": "number"}, "on": {"type": ["boolean", "null"]},
        "list": {"type": "array"}, "of": {"$ref": "#/$defs/a~1b"}, "one": {"enum": [1, "x"]}, "const": {"const": "5"},
        "all": {"allOf": [{"type": "integer"}, {"minimum": 2}]}, "lost": {"$ref": "#/$defs/none"},
        "loop": {"$ref": "#/properties/loop"}, "odd": {"type": 3}, "any": {},
    },
    "$defs": {"a/b": {"type": "object"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"), ("text", '"5"', '"5"'), ("maybe", "5", "5"), ("maybe", "null", None),
        ("maybe", "None", None), ("maybe", "", ""), ("count", " 5 ", 5), ("count", "5.0", 5.0), ("count", "5.5", "5.5"),
        ("count", "five", "five"), ("share", "5", 5), ("share", "1e3", 1000.0), ("share", "NaN", "NaN"),
        ("on", "True", True), ("on", "false", False), ("on", "None", None), ("on", "1", "1"),
        ("list", '[1, "a\n"]', '[1, "a\n"]'), ("list", '[1,\n"é"]', [1, "é"]), ("of", '{"a": 1}', {"a": 1}),
        ("one", "1", 1), ("one", "x", "x"), ("const", "5", "5"), ("all", "5", 5), ("lost", "5", 5), ("loop", "5", 5),
        ("odd", "x", "x"), ("any", "True", "True"), ("any", '"x"', '"x"'), ("any", "null", None), ("other", "[]", []),
        ("count", "1" * 5000, "1" * 5000), ("list", "[" * 5000, "[" * 5000),
        ("list", "[" * 900 + "]" * 900, "[" * 900 + "]" * 900), ("any", ' {"a": "[[{"}', {"a": "[[{"}),
        ("any", "[1] [", "[1] ["),
    ],
)  # fmt: skip
def test_the_schema_says_what_a_value_is(key: str, text: str, value: Any) -> None:
    found = json.loads(typed(text, SCHEMA, key))
    assert (found, type(found)) == (value, type(value))


def test_any_text_in_any_division_gives_the_same() -> None:
    rng = random.Random(1)
    for _ in range(600):
        check_text(rng, *random_text(rng))


def test_a_long_value_takes_linear_time() -> None:
    scanner = CallScanner(XML, TOOLS)
    pieces = scanner.feed("<tool_call><function=weather><parameter=city>")
    for _ in range(40_000):
        pieces += scanner.feed("photos\n")
    pieces += scanner.feed("</parameter></function></tool_call>") + scanner.finish()
    assert not [piece for piece in pieces if isinstance(piece, TextPiece)]
    assert len(joined(pieces)[1][0][1]) > 300_000
