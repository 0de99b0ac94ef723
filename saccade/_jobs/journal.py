"""The output of a batch and its journal. The process may be killed at any moment; the next run continues its work.

    output    whole lines, one write each; the id of a line is the hash of its request and the model's revision
    journal   SQLite next to it: which rows the output has, and where

A row is appended first and journaled later, several rows at a time. After a crash the lines after the last journaled
one are read again: whole lines are kept, an incomplete one is cut off. A journal that is lost, damaged or about another
file is rebuilt from the output, which has everything that matters.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade._openai.errors import is_transient
from saccade.errors import AlreadyExists, FailedPrecondition, InvalidArgument

COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
"""The tokens that are counted for each row."""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS rows (
    id TEXT PRIMARY KEY, custom_id TEXT NOT NULL, position INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, status INTEGER NOT NULL, {", ".join(f"{name} INTEGER NOT NULL" for name in COUNTS)}
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_offset ON rows (offset);
"""
_COLUMNS = ("id", "custom_id", "position", "offset", "length", "status", *COUNTS)
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
_BEGINNING = b'{"id":"batch_req_'
"""How each line of an output begins."""
_COMMIT_ROWS = 64
_COMMIT_SECONDS = 1.0


@dataclass(frozen=True)
class Written:
    """One line of the output."""

    row_id: str
    custom_id: str
    position: int
    status: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _NotAsJournaled(Exception):
    """The output does not match the journal; the journal has been marked as invalid."""


def real_output(output: Path) -> Path:
    """The file that `output` names, after following links. Otherwise replacing the file would replace the link, and a
    job could run twice under two names. Raises FailedPrecondition for anything but a plain file in a folder."""
    try:
        real = output.resolve()
        if real.is_dir():
            raise FailedPrecondition(f"cannot write {str(output)!r}: it is a folder")
        if not real.parent.is_dir():
            raise FailedPrecondition(f"cannot write {str(output)!r}: there is no folder {str(real.parent)!r}")
        if real.exists() and not real.is_file():
            raise FailedPrecondition(
                f"cannot write {str(output)!r}: it is not a plain file, so a job could not be resumed from it"
            )
    except (OSError, ValueError, RuntimeError) as error:  # a name with a NUL, links in a circle
        raise FailedPrecondition(
            f"cannot write {str(output)!r}: {getattr(error, 'strerror', None) or error}"
        ) from error
    return real


def helper_files(output: Path) -> list[Path]:
    """Files that a job keeps next to its output, and overwrites: those of the journal, and a scratch file."""
    return [output.with_name(output.name + suffix) for suffix in (".journal", ".journal-wal", ".journal-shm", ".tmp")]


def check_apart(source: Path, written: Sequence[Path]) -> None:
    """Raises InvalidArgument if one of the files that a job writes is its input."""
    for file in written:
        if file.exists() and source.exists() and file.samefile(source):
            raise InvalidArgument(f"the output would overwrite the input {str(source)!r}")


Identify = Callable[[str], tuple[int, str] | None]
"""custom_id -> (the input's position, row id), or None if the input has no such row."""


class Journal:
    """The output file and its journal, used by one process at a time.

    Raises:
        FailedPrecondition: another process is writing the output, or one of the files cannot be written.
        AlreadyExists: the output contains something other than answers to this input with this model.
    """

    def __init__(self, output: Path, identify: Identify, *, overwrite: bool = False) -> None:
        """`overwrite`: begin with an empty output, whatever it contains."""
        output = real_output(output)
        self.output = output
        *self._database, self._scratch = helper_files(output)
        self.path = self._database[0]
        self._identify = identify
        self._pending: list[tuple[Any, ...]] = []
        self._committed = time.monotonic()
        self._db = self._open_journal()
        try:
            if overwrite:  # only when no other process is writing it
                self._db.execute("DELETE FROM rows")
                output.unlink(missing_ok=True)
            self._file = os.open(output, _FLAGS | os.O_CREAT, 0o666)
        except OSError as error:
            self._db.close()
            raise FailedPrecondition(f"cannot write {str(output)!r}: {error.strerror}") from error
        except sqlite3.Error as error:
            self._db.close()
            raise FailedPrecondition(f"cannot write {str(self.path)!r}: {error}") from error
        try:
            self._recover()
        except OSError as error:
            self.close()
            raise FailedPrecondition(f"cannot write {error.filename or str(output)!r}: {error.strerror}") from error
        except sqlite3.Error as error:  # a full disk, for example
            self.close()
            raise FailedPrecondition(f"cannot write {str(self.path)!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    # -- opening -------------------------------------------------------------------------------------------------------

    def _open_journal(self) -> sqlite3.Connection:
        try:
            try:
                return self._connect()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # error messages can contain arbitrary text
                if "locked" in str(error):
                    raise
                for file in self._database:  # damaged: rebuilt from the output
                    file.unlink(missing_ok=True)
                return self._connect()
        except OSError as error:
            raise FailedPrecondition(f"cannot write {str(self.path)!r}: {error.strerror}") from error
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise FailedPrecondition(
                    f"another process is writing {str(self.output)!r}", reason="BATCH_RUNNING"
                ) from None
            raise FailedPrecondition(f"cannot write {str(self.path)!r}: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        # One thread at a time, but the asyncio client may use a different one for each call.
        db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("BEGIN EXCLUSIVE")
            db.executescript(_SCHEMA)
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the journal is damaged")
            db.execute(f"SELECT {', '.join(_COLUMNS)} FROM rows LIMIT 1")
            db.execute("CREATE TEMP TABLE stale (id TEXT PRIMARY KEY) WITHOUT ROWID")
            db.execute("CREATE TEMP TABLE moved (id TEXT PRIMARY KEY, offset INTEGER) WITHOUT ROWID")
        except BaseException:
            db.close()
            raise
        return db

    # -- after a crash -------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        self._scratch.unlink(missing_ok=True)
        size = os.fstat(self._file).st_size
        start = self._trusted(size)
        whole = start + self._adopt(start)
        if size and not whole:
            self._check_beginning()
        self._classify()
        if whole < size:
            os.ftruncate(self._file, whole)
        self._db.execute("DELETE FROM rows WHERE id IN (SELECT id FROM stale)")
        if _one(self._db, "SELECT coalesce(sum(length), 0) FROM rows") != whole:
            try:
                self._rewrite("offset")
            except _NotAsJournaled:
                self._recover()

    def _check_beginning(self) -> None:
        """Checks an output without a whole line before it is truncated: it must be the beginning of an answer's line,
        or the zeros that a power failure leaves. Raises AlreadyExists."""
        head = self._read(0, len(_BEGINNING))
        if head.strip(b"\0") and not _BEGINNING.startswith(head):
            raise self._foreign("something other than answers of a batch")

    def _trusted(self, size: int) -> int:
        """The offset up to which the journal describes the output; 0 if they do not belong together."""
        end, total = self._db.execute(
            "SELECT coalesce(max(offset + length), 0), coalesce(sum(length), 0) FROM rows"
        ).fetchone()
        if not _one(self._db, "PRAGMA user_version") and end == total <= size and end > 0:
            offset, length, row_id = self._db.execute(
                "SELECT offset, length, id FROM rows ORDER BY offset DESC LIMIT 1"
            ).fetchone()
            line = self._read(offset, length)
            with suppress(ValueError):
                if line.endswith(b"\n") and json.loads(line)["id"] == row_id:
                    return int(end)
        self._db.execute("DELETE FROM rows")
        self._db.execute("PRAGMA user_version = 0")
        return 0

    def _read(self, offset: int, length: int) -> bytes:
        os.lseek(self._file, offset, os.SEEK_SET)  # appends go to the end regardless of this position
        return os.read(self._file, length)

    def _adopt(self, start: int) -> int:
        """Journals the whole lines from `start` on and returns their size in bytes. A second line for a known row is
        skipped."""
        taken = 0
        rows: list[tuple[Any, ...]] = []
        with open(self.output, "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # incomplete
                try:
                    row_id, custom_id, *numbers = _parsed(line)
                except ValueError as error:
                    raise self._foreign("a line that is not an answer of a batch") from error
                known = self._identify(custom_id)
                rows.append((row_id, custom_id, known[0] if known else -1, start + taken, len(line), *numbers))
                taken += len(line)
                if len(rows) == 1000:
                    self._insert(rows)
                    rows = []
        self._insert(rows)
        return taken

    def _classify(self) -> None:
        """Finds the rows to answer again: changed requests and temporary errors."""
        count = ours = 0
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM stale")
        for row_id, custom_id, position, status in self._db.execute(
            "SELECT id, custom_id, position, status FROM rows ORDER BY id"
        ):
            count += 1
            known = self._identify(custom_id)
            mine = known is not None and known[1] == row_id
            ours += mine
            if not mine or is_transient(status):
                self._db.execute("INSERT INTO stale VALUES (?)", (row_id,))
            elif known is not None and known[0] != position:
                self._db.execute("UPDATE rows SET position = ? WHERE id = ?", (known[0], row_id))
        self._db.execute("COMMIT")
        if count and not ours:
            raise self._foreign(f"{count} answers, none of them to this input with this model")

    def _foreign(self, what: str) -> AlreadyExists:
        return AlreadyExists(
            f"{str(self.output)!r} holds {what}; name another output or set overwrite",
            reason="BATCH_OUTPUT_FOREIGN",
        )

    def _rewrite(self, order: str) -> None:
        """Rewrites the output with only the journaled lines, in the order of `offset` or of `position`."""
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM moved")
        with open(self._scratch, "wb") as scratch:
            with suppress(OSError):  # a file system without permissions
                os.chmod(self._scratch, stat.S_IMODE(os.fstat(self._file).st_mode))
            for offset, length, row_id in self._db.execute(f"SELECT offset, length, id FROM rows ORDER BY {order}"):
                line = self._read(offset, length)
                if not line.endswith(b"\n") or row_id.encode() not in line[: len(row_id) + 20]:
                    self._db.execute("PRAGMA user_version = 1")
                    self._db.execute("COMMIT")
                    raise _NotAsJournaled
                self._db.execute("INSERT INTO moved VALUES (?, ?)", (row_id, scratch.tell()))
                scratch.write(line)
            scratch.flush()
            os.fsync(scratch.fileno())
        # The journal is marked as invalid until the two match again.
        self._db.execute("PRAGMA user_version = 1")
        self._db.execute("COMMIT")
        os.replace(self._scratch, self.output)
        os.close(self._file)
        self._file = os.open(self.output, _FLAGS)
        self._db.execute("BEGIN")
        self._db.execute("UPDATE rows SET offset = (SELECT offset FROM moved WHERE moved.id = rows.id)")
        self._db.execute("PRAGMA user_version = 0")
        self._db.execute("COMMIT")

    # -- running -------------------------------------------------------------------------------------------------------

    def append(self, line: bytes, written: Written) -> None:
        """Appends one line. From then on it survives a crash of this process, and once the rows are committed, after a
        second or 64 rows, also a crash of the machine."""
        offset, pending = os.fstat(self._file).st_size, len(self._pending)
        try:
            done = 0
            while done < len(line):
                done += os.write(self._file, line[done:])
            self._pending.append(
                (
                    written.row_id, written.custom_id, written.position, offset, len(line), written.status,
                    *(getattr(written, name) for name in COUNTS),
                )
            )  # fmt: skip
        except BaseException as error:  # also an interrupt: both the line and its entry are kept, or neither
            del self._pending[pending:]
            os.ftruncate(self._file, offset)
            if isinstance(error, OSError):
                raise FailedPrecondition(f"cannot write {str(self.output)!r}: {error.strerror}") from error
            raise
        if len(self._pending) >= _COMMIT_ROWS or time.monotonic() - self._committed >= _COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Writes everything to the disk, the output before the journal that describes it.

        Raises:
            FailedPrecondition: the output cannot be written, or has been deleted or replaced since it was opened.
        """
        if self._pending:
            _check_in_place(self.output, self._file)
            try:
                os.fsync(self._file)
                self._insert(self._pending)
            except (OSError, sqlite3.Error) as error:
                raise FailedPrecondition(f"cannot write {str(self.output)!r} and its journal: {error}") from error
            self._pending = []
        self._committed = time.monotonic()

    def _insert(self, rows: list[tuple[Any, ...]]) -> None:
        self._db.execute("BEGIN")
        try:
            self._db.executemany(f"INSERT OR IGNORE INTO rows VALUES ({', '.join('?' * len(_COLUMNS))})", rows)
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def positions(self) -> Iterator[int]:
        """Input positions of the rows in the output, in the output's order."""
        for (position,) in self._db.execute("SELECT position FROM rows ORDER BY offset"):
            yield position

    def sort(self) -> None:
        """Sorts the output in the order of the input. Raises FailedPrecondition if there is no space for a copy."""
        self.commit()
        last = -1
        for position in self.positions():
            if position < last:
                break
            last = position
        else:
            return
        try:
            try:
                self._rewrite("position")
            except _NotAsJournaled:
                self._recover()
                self._rewrite("position")
        except (OSError, sqlite3.Error) as error:
            raise FailedPrecondition(f"cannot sort {str(self.output)!r}: {error}") from error

    def totals(self) -> dict[str, int]:
        """Rows, error rows and tokens in the output."""
        sums = ", ".join(f"coalesce(sum({name}), 0)" for name in COUNTS)
        found = self._db.execute(f"SELECT count(*), coalesce(sum(status != 200), 0), {sums} FROM rows").fetchone()
        return dict(zip(("rows", "failed", *COUNTS), found, strict=True))

    def close(self) -> None:
        """Commits and closes both files. Idempotent."""
        if self._file >= 0:
            with suppress(FailedPrecondition):  # the output has everything that the journal lacks
                self.commit()
            os.close(self._file)
            self._file = -1
            with suppress(sqlite3.Error):
                self._db.close()


def recount(output: Path) -> dict[str, int]:
    """The totals of an output without a journal; an incomplete last line is cut off. See `Journal.totals`."""
    totals = dict.fromkeys(("rows", "failed", *COUNTS), 0)
    with open(output, "r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(file.tell() - len(line))
                break
            with suppress(ValueError):  # the zeros that a power failure leaves
                _, _, status, *tokens = _parsed(line)
                for name, count in zip(totals, (1, int(status != 200), *tokens), strict=True):
                    totals[name] += count
    return totals


def _check_in_place(output: Path, descriptor: int) -> None:
    """Raises FailedPrecondition if the output's name no longer refers to the open file: what is written to it would be
    lost when it is closed."""
    mine = os.fstat(descriptor)
    try:
        found = os.path.samestat(os.stat(output), mine)
    except OSError:
        found = False
    if not found:
        raise FailedPrecondition(f"{str(output)!r} has been deleted or replaced while it was written")


def _one(db: sqlite3.Connection, query: str) -> int:
    """The only number that a query returns."""
    return int(db.execute(query).fetchone()[0])


def _parsed(line: bytes) -> tuple[str, str, int, int, int, int, int]:
    """(id, custom id, status, and the numbers of `COUNTS`) of a line of the output. Raises ValueError for a line
    that is not an answer of a batch, or has values that the journal cannot hold."""
    try:
        row = json.loads(line)
        row_id, custom_id, status = row["id"], row["custom_id"], row["response"]["status_code"]
        usage = row["response"]["body"].get("usage") or {}
        of_prompt, of_answer = (usage.get(f"{part}_tokens_details") or {} for part in ("prompt", "completion"))
        numbers = (
            status, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0),
            of_prompt.get("cached_tokens", 0), of_answer.get("reasoning_tokens", 0),
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no {error}") from error
    if not (isinstance(row_id, str) and isinstance(custom_id, str)):
        raise ValueError("an id of another type")
    if not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
        raise ValueError("a status or a number of tokens of another type or size")
    (row_id + custom_id).encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return row_id, custom_id, *numbers
