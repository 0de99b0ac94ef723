"""Finds tool calls in the text of a model, while it is generated. Without I/O; one parser per markup.

Text is passed on until a call begins. A call is reported once its name is known to be that of a tool, and its arguments
as they are written. What is no call remains text, markers included; if a call breaks off, its arguments stay incomplete
and the rest is text, or is dropped if the whole answer was cut off there. White space between text and calls belongs to
the markup. How the text is divided does not change the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from families.tool_literals import call_text, keyword_steps, literal_steps
from families.tool_steps import SPACE, Cursor, Ended, Mismatch, Steps, json_steps, overlap
from families.tool_values import json_text, json_value, only_string, typed


@dataclass(frozen=True)
class ToolMarkup:
    """How a model writes calls."""

    begin: str
    end: str
    body: Literal["xml", "object", "list", "python", "lines"]
    """`xml`: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`, one call. `object`: a JSON object with
    `name` and `arguments`, `list`: a JSON list of such objects; both are read in both forms. `python`: a Python list of
    calls `NAME(KEY=LITERAL, ...)`; one call without the list and the JSON forms are read, too. `lines`: such calls, one
    per line. `families.tool_literals` says what literals are."""
    sign: str
    """Text that a chat template contains if the model writes calls like this."""


XML = ToolMarkup("<tool_call>", "</tool_call>", "xml", "<function=")
"""Nemotron 3, Qwen3-Coder, Qwen3.5 and later."""
HERMES = ToolMarkup("<tool_call>", "</tool_call>", "object", "<tool_call>")
"""Hermes, Qwen2.5, Qwen3, Granite 4."""
CALL_LIST = ToolMarkup("<TOOLCALL>", "</TOOLCALL>", "list", "<TOOLCALL>")
"""Nemotron Nano v2."""
HERMES_LIST = ToolMarkup("<tool_call>", "</tool_call>", "list", '"name": "function_name"')
"""Small models of Falcon-H1. Their chat template has an example of a call."""
PYTHON_LIST = ToolMarkup("<|tool_call_start|>", "<|tool_call_end|>", "python", "List of tools: ")
"""LFM2 and LFM2.5. Most of their chat templates show no call."""
PYTHON_LINES = ToolMarkup("<function_calls>", "</function_calls>", "lines", "<function_calls>")
"""OLMo 3."""


@dataclass(frozen=True)
class TextPiece:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A part of call `index`. The first has the name; the arguments of all parts together are a JSON object, unless the
    call breaks off."""

    index: int
    arguments: str
    name: str = ""


Piece = TextPiece | CallPiece


class CallScanner:
    """Converts one sample's text to text and calls."""

    def __init__(
        self, markup: ToolMarkup, tools: Mapping[str, Mapping[str, Any]], *, single: bool = False,
        at_once: bool = False, only: bool = False,
    ) -> None:  # fmt: skip
        """`tools`: the JSON schema of each tool's arguments, by name. `single`: the first complete call is the end of
        the answer; nothing after it is reported. `at_once`: a text that does not begin with a call has none. `only`:
        there are only calls, so that a part of a marker at the end of an answer that was cut off is no text."""
        self._markup, self._tools, self._single, self._at_once, self._only = markup, tools, single, at_once, only
        self._longest_name = max(map(len, tools), default=0) + 2
        self._cursor = Cursor()
        self._pieces: list[Piece] = []
        self._cut = False
        """Whether the text ends where the answer was cut off."""
        self._after_call = False
        """Whether no text has followed the last call."""
        self.calls = 0
        """Number of calls that have begun."""
        self.complete = 0
        """Number of calls whose arguments are complete."""
        self._steps: Iterator[None] = self._parse()

    @property
    def done(self) -> bool:
        """Whether the answer ends here."""
        return self._single and self.complete > 0

    @property
    def pending(self) -> bool:
        """Whether some call is not complete."""
        return self.complete < self.calls

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain."""
        self._cursor.text += text
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """The rest, at the end of the text. `cut`: the answer was cut off, so the rest of a call is no text."""
        self._cursor.final, self._cut = True, cut
        return self.feed("")

    # -- parsing -------------------------------------------------------------------------------------------------------

    def _parse(self) -> Steps:
        cursor = self._cursor
        bodies: dict[str, Callable[[], Steps]] = {
            "xml": self._xml, "object": partial(self._list, self._item), "list": partial(self._list, self._item),
            "python": partial(self._list, self._call), "lines": self._lines,
        }  # fmt: skip
        body = bodies[self._markup.body]
        begin = self._markup.begin
        if self._at_once:
            try:
                yield from cursor.word(begin)
                cursor.at = 0
            except Mismatch:
                while True:
                    self._pass_on(len(cursor.text))
                    yield
        while True:
            yield from self._outside()
            if cursor.final and begin not in cursor.text:
                return
            started, cursor.at = self.calls, cursor.text.index(begin) + len(begin)
            try:
                yield from body()
                if self.done:
                    break
                yield from cursor.space()
                yield from cursor.word(self._markup.end)
                cursor.drop()
            except Mismatch as mismatch:
                if self._cut and isinstance(mismatch, Ended):
                    cursor.text, cursor.at = "", 0
                elif self.calls == started:
                    self._pass_on(cursor.text.index(begin) + len(begin))
        cursor.final = True  # nothing after the only call
        while True:
            cursor.text = ""
            yield

    def _outside(self) -> Steps:
        """Passes text on until it begins with the marker of a call, perhaps after white space, or is at its end."""
        cursor = self._cursor
        begin = self._markup.begin
        while (at := cursor.text.find(begin)) < 0 and not cursor.final:
            self._pass_on(_trimmed(cursor.text, len(cursor.text) - overlap(cursor.text, begin)))
            yield
        if at < 0 and ((self._only and self._cut) or (self._after_call and not cursor.text.strip(SPACE))):
            cursor.text = ""
        self._pass_on(_trimmed(cursor.text, at) if at >= 0 else len(cursor.text))

    def _xml(self) -> Steps:
        """The function with its parameters."""
        cursor = self._cursor
        yield from cursor.space()
        yield from cursor.word("<function=")
        name = yield from cursor.until(">", self._longest_name)
        schema = self._start(name.strip())
        self._argue("{")
        keys = set[str]()
        while True:
            yield from cursor.space()
            if (yield from cursor.word("</function>", "<parameter=")) == "</function>":
                break
            key = (yield from cursor.until(">", _LONGEST_KEY)).strip()
            if key in keys:
                raise Mismatch
            before = f"{', ' if keys else ''}{json_text(key)}: "
            keys.add(key)
            if only_string(schema, key):
                self._argue(f'{before}"')
                yield from self._string()
            else:
                value = yield from _value(cursor)
                self._argue(before + typed(value.removeprefix("\n").removesuffix("\n"), schema, key))
        self.complete += 1
        self._argue("}")

    def _string(self) -> Steps:
        """A parameter that is a string, as it is written: the newlines next to the tags are not part of it."""
        cursor = self._cursor
        yield from cursor.char()
        cursor.at += cursor.text.startswith("\n", cursor.at)
        while (end := cursor.text.find("</parameter>", cursor.at)) < 0:
            end = len(cursor.text) - overlap(cursor.text, "</parameter>")
            end = max(cursor.at, end - cursor.text.endswith("\n", cursor.at, end))
            written, cursor.at = cursor.text[cursor.at : end], end
            if written:
                self._argue(json_text(written)[1:-1])
            yield from cursor.more()
        written = cursor.text[cursor.at : end].removesuffix("\n")
        cursor.at = end + len("</parameter>")
        self._argue(json_text(written)[1:])

    def _list(self, item: Callable[[], Steps]) -> Steps:
        """A list of calls, or one alone."""
        cursor = self._cursor
        yield from cursor.space()
        if cursor.text[cursor.at] != "[":
            return (yield from item())
        cursor.at += 1
        while True:
            yield from item()
            if self.done:
                return
            yield from cursor.space()
            if (yield from cursor.word("]", ",")) == ",":
                yield from cursor.space()
                if cursor.text[cursor.at] != "]":
                    continue
                cursor.at += 1  # a comma may follow the last item, as in Python
            cursor.drop()
            return

    def _item(self) -> Steps:
        """A JSON object with `name` and `arguments`, usually in this order: then the arguments are reported as they are
        written."""
        cursor = self._cursor
        yield from cursor.space()
        begin = cursor.at
        try:
            name = yield from _head(cursor, self._tools, self._longest_name)
        except Mismatch:
            cursor.at = begin
            return (yield from self._whole())
        self._start(name)
        yield from json_steps(cursor, self._flush)
        self.complete += 1
        if not self.done:
            yield from cursor.space()
            yield from cursor.word("}")
            cursor.drop()

    def _lines(self) -> Steps:
        """Python calls with white space between them, up to the marker of the end."""
        cursor = self._cursor
        yield from cursor.space()
        while True:
            yield from self._call()
            if self.done:
                return
            yield from cursor.space()
            if cursor.text[cursor.at] == self._markup.end[0]:
                return

    def _call(self) -> Steps:
        """A Python call, or a JSON object. It is reported from its first keyword on, so one with positional arguments
        remains text."""
        cursor = self._cursor
        yield from cursor.space()
        if cursor.text[cursor.at] == "{":
            return (yield from self._item())
        name = (yield from cursor.until("(", self._longest_name)).strip(SPACE)
        if name not in self._tools:
            raise Mismatch
        key = yield from keyword_steps(cursor, first=True)
        self._start(name)
        self._argue("{")
        keys = set[str]()
        while key is not None:
            if key in keys:
                raise Mismatch
            self._argue(f"{', ' if keys else ''}{json_text(key)}: ")
            keys.add(key)
            yield from literal_steps(cursor, self._argue)
            key = yield from keyword_steps(cursor, first=False)
        self.complete += 1
        self._argue("}")

    def _whole(self) -> Steps:
        """A JSON object with `name` and `arguments` in any order."""
        cursor = self._cursor
        begin = cursor.at
        yield from json_steps(cursor)
        try:
            item = json.loads(cursor.text[begin : cursor.at])
            if not isinstance(item, dict):
                raise Mismatch
            arguments = item.get("arguments", item.get("parameters", {}))
            if isinstance(arguments, str):  # as in OpenAI's protocol
                arguments = json_value(arguments)
            told = json_text(arguments)
        except ValueError:
            raise Mismatch from None
        if not isinstance(item.get("name"), str) or not isinstance(arguments, dict):
            raise Mismatch
        self._start(item["name"])
        self._argue(told)
        self.complete += 1

    # -- results -------------------------------------------------------------------------------------------------------

    def _add(self, piece: Piece) -> None:
        self._after_call = isinstance(piece, CallPiece)
        match (self._pieces[-1] if self._pieces else None), piece:
            case TextPiece(before), TextPiece(text):
                self._pieces[-1] = TextPiece(before + text)
            case CallPiece(index, arguments, name), CallPiece() if index == piece.index:
                self._pieces[-1] = CallPiece(index, arguments + piece.arguments, name)
            case _:
                self._pieces.append(piece)

    def _pass_on(self, end: int) -> None:
        """Reports the text before `end` as such."""
        cursor = self._cursor
        if end:
            self._add(TextPiece(cursor.text[:end]))
        cursor.text, cursor.at = cursor.text[end:], 0

    def _start(self, name: str) -> Mapping[str, Any]:
        """Reports that a call begins; returns the schema of its arguments. Raises Mismatch for an unknown tool."""
        if name not in self._tools:
            raise Mismatch
        self.calls += 1
        self._add(CallPiece(self.calls - 1, "", name))
        self._cursor.drop()
        return self._tools[name]

    def _argue(self, arguments: str) -> None:
        """Reports text of the call's arguments, for all that has been parsed."""
        if arguments:
            self._add(CallPiece(self.calls - 1, arguments))
        self._cursor.drop()

    def _flush(self) -> None:
        """Reports what has been parsed as text of the call's arguments."""
        cursor = self._cursor
        if cursor.at:
            self._argue(cursor.text[: cursor.at])


_LONGEST_KEY = 1024


def _trimmed(text: str, end: int) -> int:
    """`end` without the white space before it."""
    return len(text[:end].rstrip(SPACE))


def _value(cursor: Cursor) -> Generator[None, None, str]:
    """A parameter's text. A string inside of a JSON object or list may contain the closing tag."""
    begin = cursor.at
    try:
        yield from cursor.space()
        if cursor.text[cursor.at] in "{[":
            start = cursor.at
            yield from json_steps(cursor)
            value = cursor.text[start : cursor.at]
            yield from cursor.space()
            yield from cursor.word("</parameter>")
            return value
    except Mismatch:
        pass
    cursor.at = begin
    return (yield from cursor.until("</parameter>"))


def _head(cursor: Cursor, tools: Collection[str], longest_name: int) -> Generator[None, None, str]:
    """The name of a JSON object's call whose arguments follow. Raises Mismatch for another order."""
    for word in ("{", '"name"', ":", '"'):
        yield from cursor.word(word)
        if word != '"':
            yield from cursor.space()
    name = yield from cursor.until('"', longest_name)
    if name not in tools:
        raise Mismatch
    yield from cursor.space()
    yield from cursor.word(",")
    yield from cursor.space()
    yield from cursor.word('"arguments"', '"parameters"')
    yield from cursor.space()
    yield from cursor.word(":")
    yield from cursor.space()
    if not cursor.text.startswith("{", cursor.at):
        raise Mismatch
    return name


def calls_text(markup: ToolMarkup, calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """Names and arguments of calls as a model writes them; None for XML, whose released chat templates print calls."""
    if markup.body == "xml":
        return None
    python = markup.body in ("python", "lines")
    told = [
        call_text(name, arguments) if python else json_text({"name": name, "arguments": arguments})
        for name, arguments in calls
    ]
    if markup.body == "object":
        return "\n".join(f"{markup.begin}\n{call}\n{markup.end}" for call in told)
    inner = "\n".join(told) if markup.body == "lines" else f"[{', '.join(told)}]"
    return f"{markup.begin}{inner}{markup.end}"
