"""The input file: read and checked as a whole once, then read again row by row when a request may start."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from saccade._core.batches import check_plain_file
from saccade._jobs.rows import CHANGED, MAX_LINE_BYTES, ImageFolder, Row, parse_again, parse_line
from saccade.errors import FailedPrecondition, InvalidArgument
from saccade.types import Model

MAX_PROBLEMS = 20
MAX_PROBLEM = 1000
"""Longest description of a problem in characters: a message may contain a key or a value of the line."""
_MAX_MODELS = 20


class BatchInput:
    """The rows of a file. Only ids and hashes are kept, in a temporary database on disk.

    Raises:
        InvalidArgument: the file cannot be read, or has lines that are not valid requests; the error's `problems` has a
            sentence for each of the first 20, with its line number.
        FailedPrecondition: there is no space for the temporary database.
    """

    def __init__(self, path: Path, folder: ImageFolder, *, strict: bool = False) -> None:
        """`strict`: see `BatchOptions`."""
        self.path, self.folder, self._strict = path, folder, strict
        self.total = 0
        self.models: set[str] = set()
        """Models that rows name, at most 20 of them."""
        self._salt = b""
        # An empty name is a temporary file that SQLite deletes. Asyncio may use another thread for each call.
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE input (position INTEGER PRIMARY KEY, line INTEGER, offset INTEGER, length INTEGER,"
            " custom_id TEXT UNIQUE, line_digest BLOB, digest BLOB, done INTEGER DEFAULT 0);"
        )
        try:
            with _kept():
                self._check()
        except BaseException:
            self._db.close()
            raise

    def _check(self) -> None:
        check_plain_file(self.path)
        problems: list[str] = []
        self._db.execute("BEGIN")
        try:
            with open(self.path, "rb") as file:
                for number, offset, line in _lines(file):
                    try:
                        if len(line) > MAX_LINE_BYTES:
                            raise InvalidArgument(f"longer than {MAX_LINE_BYTES} bytes")
                        self._take(number, offset, line)
                    except InvalidArgument as error:
                        problems.append(f"line {number}: {_shortened(error.message)}")
                        if len(problems) == MAX_PROBLEMS:
                            problems.append("there may be more: later lines were not checked")
                            break
        except OSError as error:
            raise InvalidArgument(f"cannot read {str(self.path)!r}: {error.strerror}") from error
        self._db.execute("COMMIT")
        if problems:
            raise BatchInvalid(f"{self.path}: " + "; ".join(problems[:1]), problems)
        if not self.total:
            raise BatchInvalid(f"{self.path}: no requests in it", [])

    def _take(self, number: int, offset: int, line: bytes) -> None:
        row = parse_line(line, self.total, self.folder, strict=self._strict)
        try:
            self._db.execute(
                "INSERT INTO input (position, line, offset, length, custom_id, line_digest, digest)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (self.total, number, offset, len(line), row.custom_id, row.line_digest, row.digest),
            )
        except sqlite3.IntegrityError:
            (first,) = self._db.execute("SELECT line FROM input WHERE custom_id = ?", (row.custom_id,)).fetchone()
            raise InvalidArgument(f"custom_id {row.custom_id!r} is already used in line {first}") from None
        self.total += 1
        if len(self.models) < _MAX_MODELS:
            self.models.add(row.body.get("model") or "")

    def bind(self, model: Model) -> None:
        """Sets the model, with its revision, whose answers the row ids stand for."""
        self._salt = f"{model.name}\0{model.version}".encode()

    def row_id(self, digest: bytes) -> str:
        return f"batch_req_{hashlib.sha256(digest + self._salt).hexdigest()[:32]}"

    def identify(self, custom_id: str) -> tuple[int, str] | None:
        """(position, row id) of the row with this custom_id."""
        found = self._db.execute("SELECT position, digest FROM input WHERE custom_id = ?", (custom_id,)).fetchone()
        return None if found is None else (found[0], self.row_id(found[1]))

    def skip(self, positions: Iterator[int]) -> None:
        with _kept():
            self._db.execute("BEGIN")
            self._db.executemany("UPDATE input SET done = 1 WHERE position = ?", ((p,) for p in positions))
            self._db.execute("COMMIT")

    def rows(self) -> Generator[Row, None, None]:
        """The rows that are not yet done, read again. Raises FailedPrecondition if the file has changed."""
        try:
            file = open(self.path, "rb")
        except OSError as error:
            raise FailedPrecondition(
                f"{self.path} cannot be read any more: {error.strerror}", reason=CHANGED
            ) from error
        with file:
            for position, line, offset, length, line_digest, digest in self._db.execute(
                "SELECT position, line, offset, length, line_digest, digest FROM input WHERE done = 0 ORDER BY position"
            ):
                file.seek(offset)
                try:
                    yield parse_again(file.read(length), position, line_digest, digest)
                except InvalidArgument as error:
                    raise FailedPrecondition(
                        f"{self.path}: line {line} has changed since it was checked", reason=CHANGED
                    ) from error

    def close(self) -> None:
        self._db.close()


class BatchInvalid(InvalidArgument):
    """The input has invalid lines."""

    def __init__(self, message: str, problems: list[str]) -> None:
        super().__init__(message, reason="BATCH_INVALID")
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.problems), self.__dict__


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_PROBLEM else f"{text[:MAX_PROBLEM]}... ({len(text)} characters)"


@contextmanager
def _kept() -> Iterator[None]:
    """Raises FailedPrecondition where the temporary database cannot be written."""
    try:
        yield
    except sqlite3.Error as error:
        raise FailedPrecondition(
            f"cannot write the temporary file with the ids of the rows: {error}; set SQLITE_TMPDIR to another folder"
        ) from error


def _lines(file: Any) -> Iterator[tuple[int, int, bytes]]:
    """(number, offset, line) of lines that are not blank. A line that is too long is truncated and ends the
    iteration."""
    offset = number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if content.strip():
            yield number, offset + len(line) - len(content), content
        if len(line) > MAX_LINE_BYTES:
            return
        offset += len(line)
