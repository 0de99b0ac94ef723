"""Python calls with literals as arguments: steps of a parser that gives their JSON, and calls as such text.

Literals are strings, decimal numbers, `True`, `False`, `None` or JSON's names for them, lists, tuples (as lists), and
dicts whose keys are strings; a comma may follow the last item. A number in JSON's notation is copied, other notations
are read as Python reads them, leading zeros as well: `+5`, `.5`, `1_000`, `07`. Sets, other names and expressions are
no literals here, and neither is what JSON cannot hold, such as `nan`.

Strings are in one or three quotation marks of either kind, without a prefix. They have the escapes of Python, except
for `\\N{...}`, and `\\/` of JSON; other backslashes are part of the string. Released chat templates print strings of
earlier calls without any escape, so models write such strings, too: a string may contain line breaks, and a quotation
mark ends it only if one of `,)]}:` follows. If another quotation mark follows, the text is no literal, as it may be a
concatenation.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

from families.tool_steps import DEEPEST, JSON_SCALAR, SPACE, Cursor, Mismatch, Steps, scalar
from families.tool_values import PYTHON_NAMES, json_text

_QUOTES = "'\""
_FOLLOWERS = ",)]}:"
"""Characters that may follow a string, after white space."""
_CLOSERS = {"[": "]", "{": "}", "(": " "}
"""What must follow the items of a bracket. A space stands for `)` while a tuple has no comma: `(1)` is no tuple."""
_RUN = re.compile(r"""[^'"\\]+""")
_FOLLOWER = re.compile(rf"[{SPACE}]*(.?)", re.DOTALL)
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPE_BEGINS = re.compile(r"\\(?:[0-7]{0,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})")
"""An escape that is not complete or may go on."""
_ESCAPED = {
    "\\": "\\", "'": "'", '"': '"', "/": "/", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", "\n": "",
}  # fmt: skip
KEYWORD = re.compile(r"""[^\s=,()\[\]{}'"]{1,256}""")
"""The name of an argument: any word, as parameters may have names that are not identifiers in Python."""


def keyword_steps(cursor: Cursor, *, first: bool) -> Generator[None, None, str | None]:
    """Parses up to the value of the next argument, and returns its name; None at the end of the call. `first`: no
    argument precedes it."""
    yield from cursor.space()
    if not first:
        if (yield from cursor.word(")", ",")) == ")":
            return None
        yield from cursor.space()
    if cursor.text[cursor.at] == ")":
        cursor.at += 1
        return None
    while (found := KEYWORD.match(cursor.text, cursor.at)) is not None and found.end() == len(cursor.text):
        yield from cursor.more()
    if found is None:
        raise Mismatch
    cursor.at = found.end()
    yield from cursor.space()
    yield from cursor.word("=")
    return found[0]


def literal_steps(cursor: Cursor, tell: Callable[[str], None]) -> Steps:
    """Parses a literal. `tell` gets parts of its JSON before more text is needed and at the end, maybe empty ones, and
    may drop what has been parsed. Raises Mismatch at the first character that cannot be part of one."""
    told: list[str] = []

    def flush() -> None:
        tell("".join(told))
        told.clear()

    closers, expected = "", "value"
    try:
        while closers or expected != "next":
            yield from cursor.space(flush)
            char, closer = cursor.text[cursor.at], closers[-1:]
            empty_tuple = closer == " " and char == ")" and expected == "first"
            if empty_tuple or (char == closer and expected in ("first", "next", "item")):
                told.append("}" if char == "}" else "]")
                closers, expected = closers[:-1], "next"
                cursor.at += 1
            elif expected == "next":
                yield from cursor.word(",")
                closers, expected = closers[:-1] + closer.replace(" ", ")"), "item"
            elif expected == "colon":
                yield from cursor.word(":")
                told.append(": ")
                expected = "value"
            else:
                key = closer == "}" and expected != "value"
                if expected == "item":
                    told.append(", ")
                if char in _QUOTES:
                    yield from _string(cursor, told, flush)
                elif key:
                    raise Mismatch
                elif char in _CLOSERS and len(closers) < DEEPEST:
                    told.append("{" if char == "{" else "[")
                    closers += _CLOSERS[char]
                    cursor.at += 1
                    expected = "first"
                    continue
                else:
                    text = yield from scalar(cursor, flush)
                    told.append(_scalar_json(text))
                    cursor.at += len(text)
                expected = "colon" if key else "next"
    finally:
        flush()


def _string(cursor: Cursor, told: list[str], flush: Callable[[], None]) -> Steps:
    quote = cursor.text[cursor.at]
    while (mark := cursor.text[cursor.at : cursor.at + 3]) in (quote, quote * 2):
        flush()
        yield from cursor.more()
    if mark != quote * 3:
        mark = quote
    told.append('"')
    cursor.at += len(mark)
    while True:
        part = _part(cursor.text, cursor.at, mark)
        if part is None:
            flush()
            yield from cursor.more()
            continue
        told.append(part[0])
        cursor.at = part[1]
        if part[0] == '"':
            return


def _part(text: str, at: int, mark: str) -> tuple[str, int] | None:
    """The next part of a string in JSON, and where it ends; a quotation mark alone is the end of the string. None: this
    depends on text that has not arrived. Raises Mismatch."""
    if run := _RUN.match(text, at):
        return json_text(run[0])[1:-1], run.end()
    if text.startswith("\\", at):
        return _escape(text, at)
    end = at + len(mark)
    if text[at:end] == mark:
        follower = _FOLLOWER.match(text, end)
        assert follower is not None, "it matches nothing, too"
        if not follower[1]:
            return None
        if follower[1] in _FOLLOWERS:
            return '"', end
        if follower[1] in _QUOTES and len(mark) == 1:
            raise Mismatch
    elif mark.startswith(text[at:end]):
        return None
    return json_text(text[at])[1:-1], at + 1


def _escape(text: str, at: int) -> tuple[str, int] | None:
    if _ESCAPE_BEGINS.fullmatch(text, at):
        return None
    found = _ESCAPE.match(text, at)
    assert found is not None, "a character follows the backslash"
    escaped = found[1]
    if len(escaped) > 1 or escaped in "01234567":
        code = int(escaped[1:], 16) if escaped[0] in "xuU" else int(escaped, 8)
        if code > sys.maxunicode:
            raise Mismatch
        return json_text(chr(code))[1:-1], found.end()
    if escaped in "xuUN":
        raise Mismatch
    if escaped not in _ESCAPED:
        return r"\\", at + 1
    return json_text(_ESCAPED[escaped])[1:-1], found.end()


def _scalar_json(text: str) -> str:
    """The JSON of a number or name. Raises Mismatch for others."""
    if text in PYTHON_NAMES:
        return PYTHON_NAMES[text]
    if JSON_SCALAR.fullmatch(text):
        return text
    try:
        value: float = int(text)
    except ValueError:
        pass
    else:
        return str(value)
    try:
        return json_text(float(text))
    except ValueError:
        raise Mismatch from None


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call with arguments that are JSON values."""
    return f"{name}({', '.join(f'{key}={literal_text(value)}' for key, value in arguments.items())})"


def literal_text(value: Any) -> str:
    """A JSON value as a literal; strings are as in JSON."""
    match value:
        case None | True | False:
            return str(value)
        case Mapping():
            return f"{{{', '.join(f'{json_text(key)}: {literal_text(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{', '.join(map(literal_text, value))}]"
    return json_text(value)
