"""The lines of batch files in OpenAI's batch format: parsing and complete checking of requests.

    in    {"custom_id": "a1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}
    out   {"id": "batch_req_...", "custom_id": "a1", "response": {"status_code": 200, "request_id": "...",
           "body": {...}}, "error": null}

A field that would change the answer but is not supported is an error: it must not be ignored.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from saccade._openai.documents import load_object
from saccade._openai.errors import in_words
from saccade._openai.fields import Rules, chat_rules
from saccade.errors import (
    FailedPrecondition,
    InvalidArgument,
    Overloaded,
    PermissionDenied,
    SaccadeError,
    Unavailable,
)
from saccade.v1 import inference_pb2, types_pb2

URL = "/v1/chat/completions"
MAX_LINE_BYTES = 96 * 2**20
"""Enough for the largest message that a server accepts by default, 64 MiB, whose files take 4/3 of their size in
base64."""
MAX_ID_LENGTH = 512
UNREADABLE = "IMAGE_UNREADABLE"
CHANGED = "BATCH_INPUT_CHANGED"
BATCH_PRIORITY = -10
"""Below the priority of interactive calls."""
_KEY_REFUSED = frozenset({"", "PERMISSION_DENIED", "KEY_REVOKED"})
"""Reasons of PERMISSION_DENIED that concern the API key."""


def concerns_row(error: SaccadeError) -> bool:
    """Whether an error of a class that concerns all rows is a server's answer to one of them: the host of its image is
    gone or not allowed, or the row is too large."""
    if isinstance(error, PermissionDenied):
        return error.reason not in _KEY_REFUSED
    return isinstance(error, Unavailable | Overloaded) and bool(error.reason) and not error.retryable


@dataclass
class Row:
    """One request of the file."""

    position: int
    """The row's index in the file, from 0; blank lines do not count."""
    custom_id: str
    line_digest: bytes
    """Hash of the row's content, independent of whitespace and key order."""
    digest: bytes
    """Hash of the row and of the files that it refers to, which identifies its answer."""
    body: Mapping[str, Any]
    fields: Rules
    """How errors name the body's fields."""


class ImageFolder:
    """Images that rows may refer to: files inside one folder, after resolving links. `None` allows none."""

    def __init__(self, root: Path | None) -> None:
        self._root = root.resolve() if root is not None else None

    def look(self, image: types_pb2.Image, where: str) -> None:
        """Checks an image that is not a path. Raises InvalidArgument if it cannot be read."""

    def resolve(self, name: str, where: str) -> Path:
        """The resolved path. Raises InvalidArgument if it is outside the folder, absent or not a plain file."""
        if self._root is None:
            raise InvalidArgument(f"{where}: expected a data URL or a media id, not a path")
        if name.lower().startswith("file:"):
            raise InvalidArgument(f"{where}: name a file by its path inside the input's folder, without file:")
        try:
            path = (self._root / name).resolve(strict=True)
            status = path.stat()
        except (OSError, ValueError, RuntimeError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or "no such file"
            raise InvalidArgument(f"{where}: cannot read {name!r}: {why}", reason=UNREADABLE) from error
        if not path.is_relative_to(self._root):
            raise InvalidArgument(
                f"{where}: {name!r} lies outside {str(self._root)!r}, the folder of the requests: put the file there, "
                "or give its content as a data URL",
                reason="IMAGE_OUTSIDE",
            )
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{where}: {name!r} is not a plain file", reason=UNREADABLE)
        return path

    def digest(self, name: str, where: str) -> bytes:
        """SHA-256 of a file's content. Raises InvalidArgument."""
        with self._open(name, where) as file:
            digest = hashlib.sha256()
            while chunk := file.read(2**20):
                digest.update(chunk)
            return digest.digest()

    def read(self, name: str, where: str) -> bytes:
        """A file's content. Raises InvalidArgument."""
        with self._open(name, where) as file:
            return file.read()

    @contextmanager
    def _open(self, name: str, where: str) -> Iterator[BufferedReader]:
        path = self.resolve(name, where)
        try:
            with open(path, "rb") as file:
                yield file
        except OSError as error:
            raise InvalidArgument(f"{where}: cannot read {name!r}: {error.strerror}", reason=UNREADABLE) from error


def _digest(line: bytes, files: list[bytes]) -> bytes:
    """The digest of a row, from those of its line and of its files in order. Independent of timestamps and folders, so
    that a job can be copied and resumed elsewhere."""
    return hashlib.sha256(b"".join((line, *files))).digest() if files else line


def parse_line(line: bytes, position: int, folder: ImageFolder, *, strict: bool = True) -> Row:
    """Parses one line. Raises InvalidArgument describing all problems.

    Args:
        strict: whether a file that cannot be read is an error here, not only in `request_from`.
    """
    row = load_object(line)
    extra = sorted(row.keys() - {"custom_id", "method", "url", "body"})
    if extra:
        raise InvalidArgument(f"unknown keys {', '.join(extra)}; known are body, custom_id, method, url")
    custom_id = row.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_LENGTH:
        raise InvalidArgument(f"custom_id: expected a string of 1 to {MAX_ID_LENGTH} characters")
    if row.get("method", "POST") != "POST":
        raise InvalidArgument(f"method: expected POST, got {row['method']!r}")
    if row.get("url", URL) != URL:
        raise InvalidArgument(f"url: expected {URL}, got {row['url']!r}")
    body = row.get("body")
    if not isinstance(body, dict):
        raise InvalidArgument(f"body: expected an object, got {type(body).__name__}")
    line_digest = hashlib.sha256(_canonical(row)).digest()
    files: list[bytes] = []

    def look(source: Any, where: str) -> Any:
        if not isinstance(source, str):
            folder.look(source, where)
            return source
        try:
            files.append(folder.digest(source, where))
        except InvalidArgument as error:
            if strict or error.reason != UNREADABLE:
                raise
            files.append(b"unreadable")
        return b""

    fields = chat_rules(body)
    try:
        _build(body, look)
    except InvalidArgument as error:
        raise InvalidArgument(in_words(error, fields), reason=error.reason) from error
    return Row(position, custom_id, line_digest, _digest(line_digest, files), body, fields)


def parse_again(line: bytes, position: int, line_digest: bytes, digest: bytes) -> Row:
    """Parses a line that `parse_line` has accepted. Raises InvalidArgument if it has changed."""
    row = load_object(line)
    if hashlib.sha256(_canonical(row)).digest() != line_digest:
        raise InvalidArgument("the line has changed")
    return Row(position, row["custom_id"], line_digest, digest, row["body"], chat_rules(row["body"]))


def request_from(row: Row, folder: ImageFolder, *, priority: int, model: bool = True) -> inference_pb2.GenerateRequest:
    """The message for a row. `model`: whether to request the model that the row names.

    Raises:
        InvalidArgument: a file that the row refers to cannot be read.
        FailedPrecondition: a file has changed since the row was parsed.
    """
    files: list[bytes] = []

    def read(source: Any, where: str) -> Any:
        if not isinstance(source, str):
            return source
        data = folder.read(source, where)
        files.append(hashlib.sha256(data).digest())
        return data

    request = _build(row.body, read)
    if _digest(row.line_digest, files) != row.digest:
        raise FailedPrecondition("a file that the row names has changed since it was checked", reason=CHANGED)
    request.priority = priority
    if not model:
        request.model = ""
    return request


def _canonical(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:  # 1e999 becomes infinity
        raise InvalidArgument(f"a number is out of range: {error}") from error


def _build(body: Mapping[str, Any], image: Callable[[Any, str], Any]) -> inference_pb2.GenerateRequest:
    """`image(source, where)` converts a path to bytes; it returns bytes and messages unchanged."""
    # Imported here because they need Pydantic: a server without batches does not.
    from saccade._openai.chat import chat_request
    from saccade._openai.problems import validated
    from saccade._openai.schema import ChatCompletion

    request = validated(ChatCompletion, body)
    if request.stream:
        raise InvalidArgument("stream: expected false in a batch, got true")
    return chat_request(request, image)
