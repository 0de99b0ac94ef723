"""Finds tool calls in the text of a model, while it is generated. Without I/O; one table per markup.

Text is passed on until a call begins. A call in XML is reported once its name is known to be that of a tool, then
parameter by parameter; calls in JSON once their JSON is complete. What is no call remains text, markers included. If a
call in XML breaks off, its arguments are closed and the rest is text. How the text is divided does not change the
result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ToolMarkup:
    """How a model writes calls."""

    begin: str
    end: str
    body: Literal["xml", "object", "list"]
    """`xml`: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`, one call. `object`: a JSON object with
    `name` and `arguments`. `list`: a JSON list of such objects."""


XML = ToolMarkup("<tool_call>", "</tool_call>", "xml")
HERMES = ToolMarkup("<tool_call>", "</tool_call>", "object")
CALL_LIST = ToolMarkup("<TOOLCALL>", "</TOOLCALL>", "list")


@dataclass(frozen=True)
class TextPiece:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A part of call `index`. The first has the name; the arguments of all parts together are a JSON object."""

    index: int
    arguments: str
    name: str = ""


Piece = TextPiece | CallPiece


class _Incomplete(Exception):
    """More text is needed."""


class _NoCall(Exception):
    """The text is no call, or does not go on as one."""


@dataclass
class _Call:
    """What has been read of a call."""

    named: bool = False
    tool: Mapping[str, Any] = field(default_factory=dict)
    """The schema of its arguments."""
    keys: set[str] = field(default_factory=set)
    complete: bool = False
    """Only the closing marker is missing."""
    place: int = 0
    """For JSON: number of characters that have been looked at."""
    depth: int = 0
    quoted: bool = False
    escaped: bool = False

    def schema(self, key: str) -> Any:
        properties = self.tool.get("properties")
        return properties.get(key) if isinstance(properties, Mapping) else None

    def json_end(self, text: str, begin: int) -> int:
        """Index after the JSON object or list that begins at `text[begin]`. Raises _Incomplete."""
        for at in range(max(begin, self.place), len(text)):
            letter = text[at]
            if self.quoted:
                self.quoted = self.escaped or letter != '"'
                self.escaped = letter == "\\" and not self.escaped
            elif letter == '"':
                self.quoted = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if not self.depth:
                    return at + 1
        self.place = len(text)
        raise _Incomplete


class CallScanner:
    """Converts one sample's text to text and calls."""

    def __init__(self, markup: ToolMarkup, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """`tools`: the JSON schema of each tool's arguments, by name."""
        self._markup, self._tools = markup, tools
        self._held = ""
        """Text that has not been decided; inside a call, without the opening marker."""
        self._call: _Call | None = None
        self.calls = 0

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._call is not None or self._outside(pieces):
            try:
                self._inside(pieces)
            except _Incomplete:
                break
            except _NoCall:
                self._give_up(pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, at the end of the text."""
        pieces: list[Piece] = []
        while self._call is not None:
            self._give_up(pieces)
            pieces += self.feed("")
        if self._held:
            pieces.append(TextPiece(self._held))
        self._held = ""
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        """Passes text on; whether a call begins."""
        begin = self._markup.begin
        at = self._held.find(begin)
        end = at if at >= 0 else len(self._held) - _overlap(self._held, begin)
        if end:
            pieces.append(TextPiece(self._held[:end]))
        self._held = self._held[end:]
        if at < 0:
            return False
        self._held, self._call = self._held[len(begin) :], _Call()
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        """Ends a call that does not go on as one; what is held is text."""
        assert self._call is not None
        if not self._call.named:
            pieces.append(TextPiece(self._markup.begin))
        elif not self._call.complete:
            pieces.append(CallPiece(self.calls - 1, "}"))
        self._call = None

    def _inside(self, pieces: list[Piece]) -> None:
        """Reads on in a call up to its end. Raises _Incomplete, _NoCall."""
        call = self._call
        assert call is not None
        while not call.complete:
            (self._read_xml if self._markup.body == "xml" else self._read_json)(call, pieces)
        self._held = self._held[_literal(self._held, _space(self._held, 0), self._markup.end) :]
        self._call = None

    def _read_xml(self, call: _Call, pieces: list[Piece]) -> None:
        """Reads the head, a parameter, or the closing tag of the function."""
        text, at = self._held, _space(self._held, 0)
        if not call.named:
            name, at = _until(text, _literal(text, at, "<function="), ">", max(map(len, self._tools), default=0))
            if name not in self._tools:
                raise _NoCall
            pieces.append(CallPiece(self.calls, "{", name))
            call.named, call.tool, self.calls = True, self._tools[name], self.calls + 1
        elif text.startswith("</", at):
            at = _literal(text, at, "</function>")
            pieces.append(CallPiece(self.calls - 1, "}"))
            call.complete = True
        else:
            key, at = _until(text, _literal(text, at, "<parameter="), ">", _LONGEST_KEY)
            value, at = _until(text, at, "</parameter>")
            if key in call.keys:
                raise _NoCall
            argument = f"{json.dumps(key, ensure_ascii=False)}: {typed(_unwrapped(value), call.schema(key))}"
            pieces.append(CallPiece(self.calls - 1, f"{', ' if call.keys else ''}{argument}"))
            call.keys.add(key)
        self._held = text[at:]

    def _read_json(self, call: _Call, pieces: list[Piece]) -> None:
        """Reads the object or the list."""
        begin = _space(self._held, 0)
        _literal(self._held, begin, "{" if self._markup.body == "object" else "[")
        end = call.json_end(self._held, begin)
        try:
            value = json.loads(self._held[begin:end])
        except (ValueError, RecursionError):
            raise _NoCall from None
        calls = [self._checked(item) for item in ([value] if isinstance(value, dict) else value)]
        if not calls:
            raise _NoCall
        for name, arguments in calls:
            pieces.append(CallPiece(self.calls, arguments, name))
            self.calls += 1
        call.named = call.complete = True
        self._held = self._held[end:]

    def _checked(self, item: Any) -> tuple[str, str]:
        """Name and arguments of a call. Raises _NoCall."""
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in self._tools:
            raise _NoCall
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, dict):
            raise _NoCall
        return name, json.dumps(arguments, ensure_ascii=False)


_SPACE = " \t\r\n"
_LONGEST_KEY = 1024


def _overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


def _space(text: str, at: int) -> int:
    """Index of the first character from `at` that is no white space. Raises _Incomplete."""
    while at < len(text) and text[at] in _SPACE:
        at += 1
    if at == len(text):
        raise _Incomplete
    return at


def _literal(text: str, at: int, word: str) -> int:
    """Index after `word`, which must be at `at`. Raises _Incomplete, _NoCall."""
    if text.startswith(word, at):
        return at + len(word)
    raise _Incomplete if word.startswith(text[at:]) else _NoCall


def _until(text: str, at: int, word: str, longest: int | None = None) -> tuple[str, int]:
    """The text before the next `word`, at most `longest` characters, and the index after it. Raises _Incomplete,
    _NoCall."""
    end = text.find(word, at)
    if longest is not None and (end if end >= 0 else len(text)) - at > longest:
        raise _NoCall
    if end < 0:
        raise _Incomplete
    return text[at:end], end + len(word)


def _unwrapped(value: str) -> str:
    """A parameter's value without the newlines that the markup has around it."""
    return value.removeprefix("\n").removesuffix("\n")


def typed(value: str, schema: Any) -> str:
    """JSON of a parameter that was written as text: a string if the schema says so or the value is no JSON."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds not in ("string", ["string"]):
        try:
            return json.dumps(json.loads(value, parse_constant=_refuse), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
