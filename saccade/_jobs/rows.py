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

from saccade._core.formats import FORMAT_TYPES
from saccade._core.images import decode_data_url
from saccade._core.requests import build_request
from saccade.errors import FailedPrecondition, InvalidArgument
from saccade.v1 import inference_pb2, types_pb2

URL = "/v1/chat/completions"
MAX_LINE_BYTES = 96 * 2**20
"""Largest size, as base64, that the server accepts in one message by default."""
MAX_ID_LENGTH = 512
UNREADABLE = "IMAGE_UNREADABLE"
CHANGED = "BATCH_INPUT_CHANGED"
BATCH_PRIORITY = -10
"""Below the priority of interactive calls."""

# name -> (types, description, check that does not depend on the model)
_Check = tuple[tuple[type, ...], str, Callable[[Any], bool]]
_NUMBER = (int, float)
_FIELDS: dict[str, _Check] = {
    "max_tokens": ((int,), "a whole number from 1", lambda v: v >= 1),
    "max_completion_tokens": ((int,), "a whole number from 1", lambda v: v >= 1),
    "min_tokens": ((int,), "a whole number from 0", lambda v: v >= 0),
    "temperature": (_NUMBER, "a number from 0", lambda v: v >= 0),
    "top_p": (_NUMBER, "a number above 0 and up to 1", lambda v: 0 < v <= 1),
    "top_k": ((int,), "a whole number from -1", lambda v: v >= -1),
    "min_p": (_NUMBER, "a number from 0 to 1", lambda v: 0 <= v <= 1),
    "repetition_penalty": (_NUMBER, "a number above 0", lambda v: v > 0),
    "presence_penalty": (_NUMBER, "a number", lambda v: True),
    "frequency_penalty": (_NUMBER, "a number", lambda v: True),
    "seed": ((int,), "a whole number from 0 to 2^64 - 1", lambda v: 0 <= v < 2**64),
    "n": ((int,), "a whole number from 1", lambda v: v >= 1),
    "logprobs": ((bool,), "true or false", lambda v: True),
    "top_logprobs": ((int,), "a whole number from 0", lambda v: v >= 0),
    "ignore_eos": ((bool,), "true or false", lambda v: True),
    "stop": ((str, list), "a string or a list of strings", lambda v: all(isinstance(s, str) for s in v)),
    "stop_token_ids": ((list,), "a list of token ids", lambda v: all(type(i) is int for i in v)),
    "logit_bias": ((dict,), "a map from token ids to numbers", lambda v: True),
    "chat_template_kwargs": ((dict,), "a map", lambda v: True),
    "model": ((str,), "a string", lambda v: True),
    "response_format": (
        (dict,),
        f"an object with a type out of {', '.join(FORMAT_TYPES)}",
        lambda v: v.get("type") in [*FORMAT_TYPES],
    ),
    "allowed_token_ids": ((list,), "a list of token ids", lambda v: all(type(i) is int for i in v)),
    "bad_words": ((list,), "a list of strings", lambda v: all(isinstance(s, str) for s in v)),
    "reasoning_effort": ((str,), "a string", lambda v: True),
    "enable_thinking": ((bool,), "true or false", lambda v: True),
    "max_reasoning_tokens": ((int,), "a whole number from 0", lambda v: v >= 0),
}
# Informational fields that change no answer.
_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (None,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
_PART_KEYS = {
    "text": {"type", "text"},
    "image_url": {"type", "image_url"},
    "image": {"type", "image", "media_id"},
    "video_url": {"type", "video_url", "max_frames"},
    "video": {"type", "video", "media_id", "fps", "max_frames"},
}


@dataclass
class Row:
    """One request of the file."""

    position: int
    """Counts rows from 0, without blank lines."""
    custom_id: str
    line_digest: bytes
    """Hash of the row's content, independent of whitespace and key order."""
    digest: bytes
    """Hash of the row and of the files that it refers to, which identifies its answer."""
    body: Mapping[str, Any]


class ImageFolder:
    """Images that rows may refer to: files inside one folder, after resolving links. `None` allows none."""

    def __init__(self, root: Path | None) -> None:
        self._root = root.resolve() if root is not None else None

    def look(self, image: types_pb2.Image, where: str) -> None:
        """Checks an image that is not a path. Raises InvalidArgument if it cannot be read."""

    def resolve(self, name: str, where: str) -> Path:
        """The resolved path. Raises InvalidArgument if it is outside the folder, absent or not a plain file."""
        if self._root is None:
            raise InvalidArgument(f"{where}: an image is a data URL or a media id here, not a path")
        try:
            path = (self._root / name).resolve(strict=True)
            status = path.stat()
        except (OSError, ValueError, RuntimeError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or "no such file"
            raise InvalidArgument(f"{where}: cannot read {name!r}: {why}", reason=UNREADABLE) from error
        if not path.is_relative_to(self._root):
            raise InvalidArgument(f"{where}: {name!r} lies outside {str(self._root)!r}", reason="IMAGE_OUTSIDE")
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


class _Content:
    """Digest of a row: of its line and of its files in order. Independent of timestamps and folders, so that a job can
    be copied and resumed elsewhere."""

    def __init__(self, line_digest: bytes) -> None:
        self._line_digest = line_digest
        self._files: list[bytes] = []

    def add(self, file_digest: bytes) -> None:
        self._files.append(file_digest)

    def digest(self) -> bytes:
        return (
            hashlib.sha256(b"".join((self._line_digest, *self._files))).digest() if self._files else self._line_digest
        )


def parse_line(line: bytes, position: int, folder: ImageFolder, *, strict: bool = True) -> Row:
    """Parses one line. Raises InvalidArgument describing all problems.

    Args:
        strict: a file that cannot be read is an error here, not only in `request_from`.
    """
    row = _load(line)
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
    content = _Content(line_digest)

    def look(source: Any, where: str) -> Any:
        if not isinstance(source, str):
            folder.look(source, where)
            return source
        try:
            content.add(folder.digest(source, where))
        except InvalidArgument as error:
            if strict or error.reason != UNREADABLE:
                raise
            content.add(b"unreadable")
        return b""

    _build(body, look)
    return Row(position, custom_id, line_digest, content.digest(), body)


def parse_again(line: bytes, position: int, line_digest: bytes, digest: bytes) -> Row:
    """Parses a line that `parse_line` has accepted. Raises InvalidArgument if it has changed."""
    row = _load(line)
    if hashlib.sha256(_canonical(row)).digest() != line_digest:
        raise InvalidArgument("the line has changed")
    return Row(position, row["custom_id"], line_digest, digest, row["body"])


def request_from(row: Row, folder: ImageFolder, *, priority: int, model: bool = True) -> inference_pb2.GenerateRequest:
    """The message for a row. `model`: whether to request the model that the row names.

    Raises:
        InvalidArgument: a file that the row refers to cannot be read.
        FailedPrecondition: a file has changed since the row was parsed.
    """
    content = _Content(row.line_digest)

    def read(source: Any, where: str) -> Any:
        if not isinstance(source, str):
            return source
        data = folder.read(source, where)
        content.add(hashlib.sha256(data).digest())
        return data

    request = _build(row.body, read)
    if content.digest() != row.digest:
        raise FailedPrecondition("a file that the row names has changed since it was checked", reason=CHANGED)
    request.priority = priority
    if not model:
        request.model = ""
    return request


def _load(line: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON value")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) != len(pairs):
            raise ValueError("an object names a key twice")
        return built

    try:
        row = json.loads(line.decode("utf-8"), parse_constant=refuse, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"not UTF-8 at byte {error.start}") from error
    except RecursionError:
        raise InvalidArgument("nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InvalidArgument(f"expected an object, got {type(row).__name__}")
    return row


def _canonical(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("a string holds half of a surrogate pair") from error
    except ValueError as error:  # 1e999 becomes infinity
        raise InvalidArgument(f"a number is out of range: {error}") from error


def _build(body: Mapping[str, Any], image: Callable[[Any, str], Any]) -> inference_pb2.GenerateRequest:
    """`image(source, where)` converts a path to bytes; it returns bytes and messages unchanged."""
    fields = {key: value for key, value in body.items() if value is not None}
    _check_fields(fields)
    messages = [_message(m, f"messages[{i}]", image) for i, m in enumerate(_messages(fields))]
    options = {
        name: fields[name]
        for name in _FIELDS
        if name in fields and name not in ("max_completion_tokens", "logprobs", "top_logprobs", "logit_bias")
    }
    if "max_completion_tokens" in fields:
        if fields.get("max_tokens", fields["max_completion_tokens"]) != fields["max_completion_tokens"]:
            raise InvalidArgument("max_tokens and max_completion_tokens differ")
        options["max_tokens"] = fields["max_completion_tokens"]
    if fields.get("top_k") == -1:  # as other servers spell it
        options["top_k"] = 0
    if fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs", 0)
    elif fields.get("top_logprobs"):
        raise InvalidArgument("top_logprobs: needs logprobs to be true")
    if "logit_bias" in fields:
        options["logit_bias"] = _logit_bias(fields["logit_bias"])
    return build_request(messages, **options)


def _check_fields(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _FIELDS:
            kinds, expected, valid = _FIELDS[name]
            right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            if not right or not valid(value):
                raise InvalidArgument(f"{name}: expected {expected}, got {_short(value)}")
        elif name in _ONLY:
            if value not in _ONLY[name]:
                raise InvalidArgument(f"{name}: {_short(value)} is not served in batches")
        elif name not in _IGNORED and name != "messages":
            raise InvalidArgument(f"{name}: unknown field; known are messages, {', '.join(_FIELDS)}")


def _messages(fields: Mapping[str, Any]) -> list[Any]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages: expected a list of at least one message")
    return messages


def _message(message: Any, name: str, image: Callable[[Any, str], Any]) -> Any:
    if not isinstance(message, dict):
        raise InvalidArgument(f"{name}: expected a message with role and content, got {_short(message)}")
    built = dict(message)
    if built.get("role") == "developer":
        built["role"] = "system"
    if isinstance(built.get("content"), list):
        built["content"] = [
            _part(part, f"{name}.content[{i}]", image) if isinstance(part, dict) else part
            for i, part in enumerate(built["content"])
        ]
    return built


def _part(part: dict[str, Any], name: str, image: Callable[[Any, str], Any]) -> dict[str, Any]:
    kind = part.get("type")
    extra = sorted(part.keys() - _PART_KEYS.get(str(kind), part.keys()))
    if extra:
        raise InvalidArgument(f"{name}: unknown keys {', '.join(extra)}")
    if kind not in ("image", "image_url", "video", "video_url"):
        return part
    source = part.get(kind)
    if kind in ("image_url", "video_url") and isinstance(source, dict):
        if sorted(source.keys() - {"url", "detail"}):
            raise InvalidArgument(f"{name}.{kind}: known keys are detail, url")
        source, name = source.get("url"), f"{name}.{kind}.url"
    else:
        name = f"{name}.{kind}"
    if source is None and part.get("media_id"):
        source = f"media:{part['media_id']}"
    plain = str(kind).removesuffix("_url")
    options = {key: part[key] for key in ("fps", "max_frames") if part.get(key) is not None}
    if kind == "video" and isinstance(source, list):
        frames = [_opened(frame, f"{name}[{i}]", image) for i, frame in enumerate(source)]
        return {"type": plain, plain: frames, **options}
    return {"type": plain, plain: _opened(source, name, image), **options}


def _opened(source: Any, name: str, image: Callable[[Any, str], Any]) -> Any:
    """The bytes or the message for an image string of a row."""
    if not isinstance(source, str) or not source:
        raise InvalidArgument(f"{name}: expected a data URL, media:ID or a path, got {_short(source)}")
    return image(_source(source, name), name)


def _source(source: str, name: str) -> str | types_pb2.Image:
    """A message, or the string itself if it is a path."""
    scheme, colon, rest = source.partition(":")
    match scheme.lower() if colon else "":
        case "data":
            return types_pb2.Image(data=decode_data_url(source, name))
        case "media":
            return types_pb2.Image(media_id=rest)
        case "http" | "https":
            return types_pb2.Image(uri=source)
        case "file":
            raise InvalidArgument(f"{name}: name a file by its path inside the input's folder, without file:")
    return source


def _logit_bias(values: dict[str, Any]) -> dict[int, float]:
    bias = {}
    for key, value in values.items():
        if not (key.isascii() and key.isdigit()) or isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(f"logit_bias: expected token ids and numbers, got {key!r}: {_short(value)}")
        bias[int(key)] = float(value)
    return bias


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
