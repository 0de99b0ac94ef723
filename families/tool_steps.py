"""Steps of a parser whose text arrives in pieces: generators that yield when they need more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

Steps = Generator[None, None, None]
SPACE = " \t\r\n"
DEEPEST = 99
"""Largest nesting of objects and lists. A value of an argument is one level deeper in the arguments, and requests with
earlier calls may have 100 levels there (`service.answers.json_values`)."""
_LONGEST_SCALAR = 1000
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
"""Complete characters of a JSON string."""
_ESCAPE_BEGINS = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
"""An escape that is not complete, or nothing."""
_SCALAR_LETTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
JSON_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


class Mismatch(Exception):
    """The text does not go on as expected, or ends."""


class Ended(Mismatch):
    """The text ends, and is as expected so far."""


def overlap(text: str, word: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `word`."""
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)


class Cursor:
    """The text that has arrived and has not been processed, and a position in it."""

    def __init__(self, text: str = "", final: bool = False) -> None:
        self.text = text
        self.at = 0
        """Index of the first character that has not been parsed."""
        self.final = final
        """Whether no more text will arrive."""

    def drop(self) -> str:
        """Removes what has been parsed, and returns it."""
        parsed, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return parsed

    def more(self) -> Steps:
        """Waits for more text. Raises Ended at the end of the text."""
        if self.final:
            raise Ended
        yield

    def char(self) -> Generator[None, None, str]:
        """The next character, which is not parsed by this."""
        while self.at == len(self.text):
            yield from self.more()
        return self.text[self.at]

    def space(self, waiting: Callable[[], None] = lambda: None) -> Steps:
        """Skips white space and waits for another character; calls `waiting` before it waits."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in SPACE:
                self.at += 1
            if self.at < len(self.text):
                return
            waiting()
            yield from self.more()

    def word(self, *words: str) -> Generator[None, None, str]:
        """Parses one of `words`, none of which begins with another; returns it."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    self.at += len(word)
                    return word
            if not any(word.startswith(rest) for word in words):
                raise Mismatch
            yield from self.more()

    def until(self, word: str, longest: int | None = None) -> Generator[None, None, str]:
        """The text before the next `word`, at most `longest` characters; the word is parsed, too."""
        start = self.at
        while True:
            end = self.text.find(word, start)
            length = (end if end >= 0 else len(self.text)) - self.at
            if longest is not None and length > longest:
                raise Mismatch
            if end >= 0:
                found, self.at = self.text[self.at : end], end + len(word)
                return found
            start = max(self.at, len(self.text) - len(word) + 1)
            yield from self.more()


def json_steps(cursor: Cursor, flush: Callable[[], None] = lambda: None) -> Steps:
    """Parses a JSON object or list; `flush` is called before more text is needed and at the end, and may drop what has
    been parsed. Raises Mismatch at the first character that cannot be part of one."""
    closers, expected = "", "value"
    try:
        while True:
            yield from cursor.space(flush)
            char = cursor.text[cursor.at]
            key = closers[-1:] == "}" and expected in ("first", "key")
            if closers[-1:] == char and expected in ("next", "first"):
                closers, expected = closers[:-1], "next"
                cursor.at += 1
                if not closers:
                    return
            elif expected == "next":
                if not closers:
                    raise Mismatch
                yield from cursor.word(",")
                expected = "key" if closers[-1] == "}" else "value"
            elif expected == "colon":
                yield from cursor.word(":")
                expected = "value"
            elif char == '"':
                yield from _string(cursor, flush)
                expected = "colon" if key else "next"
            elif key:
                raise Mismatch
            elif char in "{[" and len(closers) < DEEPEST:
                closers, expected = closers + ("}" if char == "{" else "]"), "first"
                cursor.at += 1
            else:
                yield from _scalar(cursor, flush)
                expected = "next"
    finally:
        flush()


def _string(cursor: Cursor, flush: Callable[[], None]) -> Steps:
    cursor.at += 1
    while True:
        found = _CHARACTERS.match(cursor.text, cursor.at)
        assert found is not None, "it matches nothing, too"
        cursor.at = found.end()
        if cursor.text.startswith('"', cursor.at):
            cursor.at += 1
            return
        if not _ESCAPE_BEGINS.fullmatch(cursor.text, cursor.at):
            raise Mismatch
        flush()
        yield from cursor.more()


def scalar(cursor: Cursor, flush: Callable[[], None]) -> Generator[None, None, str]:
    """The text of a number or name, which is not parsed by this; `flush` is called before more text is needed. Raises
    Mismatch for very long ones."""
    length = 0
    while True:
        rest = cursor.text[cursor.at : cursor.at + _LONGEST_SCALAR + 1]
        while length < len(rest) and rest[length] in _SCALAR_LETTERS:
            length += 1
        if length > _LONGEST_SCALAR:
            raise Mismatch
        if length < len(rest):
            return rest[:length]
        flush()
        yield from cursor.more()


def _scalar(cursor: Cursor, flush: Callable[[], None]) -> Steps:
    text = yield from scalar(cursor, flush)
    if not JSON_SCALAR.fullmatch(text):
        raise Mismatch
    cursor.at += len(text)
