"""Arguments of calls that are written as Python calls: which literals are read, and as which JSON."""

from __future__ import annotations

import ast
import io
import json
import random
import tokenize
import warnings
from typing import Any

import pytest
from tool_texts import TOOLS, joined, random_json

from families.tool_calls import PYTHON_LIST, CallScanner
from families.tool_literals import call_text, literal_text


def arguments_of(call: str, size: int = 0) -> str | None:
    """The JSON of a call's arguments, fed whole or in parts of `size` characters. None if it has no end."""
    text = f"{PYTHON_LIST.begin}[{call}]{PYTHON_LIST.end}"
    parts = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    scanner = CallScanner(PYTHON_LIST, TOOLS)
    pieces = [piece for part in parts for piece in scanner.feed(part)]
    rest, calls = joined(pieces + scanner.finish())
    if scanner.complete != 1 or rest:
        return None
    return calls[0][1]


def read(literal: str) -> Any:
    """The JSON text of one argument; None if it is no literal."""
    found = {arguments_of(f"weather(city={literal})", size) for size in (0, 1, 2)}
    assert len(found) == 1
    told = found.pop()
    return None if told is None else told.removeprefix('{"city": ').removesuffix("}")


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("True", "true"), ("None", "null"), ("false", "false"), ("null", "null"), ("nan", None), ("inf", None),
        ("Paris", None), ("", None), ("-", None),
        ("12", "12"), ("-0.50", "-0.50"), ("1E5", "1E5"), (f"-{10**400}", f"-{10**400}"), ("1e400", "1e400"),
        ("+5", "5"), ("07", "7"), ("1_000", "1000"), (".5", "0.5"), ("1.", "1.0"), ("1.e400", None), ("0x1f", None),
        ("5j", None), ("1 + 2", None), ("5-3", None), ("9" * 1001, None),
        ("[]", "[]"), ("[1, 'a', ]", '[1, "a"]'), ("[1 2]", None), ("[, 1]", None), ("[1,, 2]", None), ("[1", None),
        ("()", "[]"), ("(1, 'a')", '[1, "a"]'), ("(1,)", "[1]"), ("((1, 2), [(3,)])", "[[1, 2], [[3]]]"), ("(1)", None),
        ("{}", "{}"), ("{'a': 1, \"b\": {'c': None}, }", '{"a": 1, "b": {"c": null}}'), ("{'a'}", None),
        ("{1: 2}", None), ("{'a': }", None), ("{'a', 'b'}", None), ("[1}", None), ("{(1, 2): 3}", None),
        ("[" * 99 + "]" * 99, "[" * 99 + "]" * 99), ("[" * 100 + "]" * 100, None),
        ("'a \"b\"'", r'"a \"b\""'), ('"it\'s"', '"it\'s"'), ("''", '""'), ('""', '""'),
        ("'''a 'b'\n'''", r'''"a 'b'\n"'''), ('"""say "hi""""', r'"say \"hi\""'), ('""""""', '""'),
        ("'a\n\tb'", r'"a\n\tb"'), ("'it's'", '"it\'s"'), ("'sed -n '1,9p' f'", '"sed -n \'1,9p\' f"'),
        ("'a' 'b'", None), ("'a''b'", None), ("'a' \n", '"a"'), ("f'a'", None), ("b'a'", None), ("'a", None),
        (r"'\'\"\\\n\t\r\a\b\f\v\/'", r'''"'\"\\\n\t\r\u0007\b\f\u000b/"'''), ("'a\\\nb'", '"ab"'),
        (r"'\x41\u00e9\U0001f600\101\0\18\400'", r'"Aé😀A\u0000\u00018Ā"'),
        (r"'\ud83d\ude00 \ud800'", r'"\ud83d\ude00 \ud800"'), (r"'\d+\('", r'"\\d+\\("'), (r"'\U00110000'", None),
        (r"'\xg1'", None), (r"'\u12'", None), (r"'\N{DASH}'", None),
    ],
)  # fmt: skip
def test_literals_have_their_json(literal: str, expected: str | None) -> None:
    assert read(literal) == expected


def test_json_in_pythons_and_in_jsons_notation_is_read_as_it_is() -> None:
    rng = random.Random(3)
    for _ in range(200):
        arguments = {key: random_json(rng) for key in rng.sample(["city", "days", "é", "from"], rng.randrange(4))}
        for notation in (repr, json.dumps, literal_text):
            told = ", ".join(f"{key}={notation(value)}" for key, value in arguments.items())
            for size in (0, 1, rng.randint(2, 9)):
                found = arguments_of(f"weather({told})", size)
                assert found is not None and json.loads(found) == arguments, told
        assert ast.literal_eval(literal_text(arguments)) == arguments
        assert arguments_of(call_text("weather", arguments)) is not None


PARTS = (
    "a", "é", "😀", "\\n", "\\'", '\\"', "\\\\", "\\x4", "1", "\\u00e", "\\U0001f60", "0", "\\d", "\\7", "\\\n", '"',
    "'", " ", ",", ")", "\\",
)  # fmt: skip


def test_strings_have_the_value_that_python_reads() -> None:
    rng, same = random.Random(4), 0
    for _ in range(1000):
        mark = rng.choice(["'", '"', "'''", '"""'])
        literal = mark + "".join(rng.choices(PARTS, k=rng.randrange(6))) + mark
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = ast.literal_eval(literal)
            tokens = [token.type for token in tokenize.generate_tokens(io.StringIO(literal).readline)]
        except (SyntaxError, ValueError, tokenize.TokenError):
            continue
        if tokens.count(tokenize.STRING) == 1:  # and not a concatenation or a tuple
            found = read(literal)
            assert found is not None and json.loads(found) == value, literal
            same += 1
    assert same > 250


def test_many_values_that_arrive_at_once_take_linear_time() -> None:
    value = [[1, "a"]] * 20_000
    found = arguments_of(f"weather(options={value!r})")
    assert found is not None and json.loads(found) == {"options": value}
