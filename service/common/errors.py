"""All errors that a call can end with: one table from exception class to status code, reason and retry advice.

The codes are those of google.rpc and independent of the transport: `service.rpc.statuses` converts them to gRPC.

The server's own errors are `StatusError`s. Other exceptions that may end a call are listed in `FOREIGN`; any other
becomes INTERNAL, and its text is only logged.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from urllib.parse import quote

from google.protobuf.message import DecodeError

from encoder.media_limits import ImageError

MAX_MESSAGE = 1024
"""Largest status message, in bytes after percent-encoding: trailers above the peer's limit (8 KiB is common) would
replace the status with RESOURCE_EXHAUSTED, and they contain the message up to three times."""
MAX_METADATA = 128
"""Characters of one value of ErrorInfo's metadata, and of a field's path."""


class Code(enum.IntEnum):
    """google.rpc.Code: how a call can end, with the same numbers."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class EngineDied(RuntimeError):
    """The engine process has ended."""


class StatusError(Exception):
    """Ends a call with a status other than OK."""

    code: Code = Code.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str | None = None, field: str | None = None,
        metadata: Mapping[str, str] | None = None, retry_after: float | None = None, quota: str | None = None,
        never_retry: bool = False,
    ) -> None:  # fmt: skip
        """`field`: path of the request field at fault. `retry_after`: seconds; None means that a retry will not help.
        `quota`: which limit was exceeded. `never_retry`: tells clients not to retry even where the code alone would
        allow it."""
        super().__init__(message)
        self.message = _short(message)
        self.reason = reason or type(self).reason
        self.field = _writable(field[:MAX_METADATA]) if field else field
        self.metadata = {name: _writable(str(value)[:MAX_METADATA]) for name, value in (metadata or {}).items()}
        self.retry_after = retry_after
        self.quota = quota
        self.never_retry = never_retry
        self.request_id = ""
        """Id of the call that this error ends; set by the door."""


def _short(message: str) -> str:
    message = _writable(message)
    if len(quote(message)) <= MAX_MESSAGE:
        return message
    kept, room = [], MAX_MESSAGE - 3
    for character in message:
        room -= len(quote(character))
        if room < 0:
            break
        kept.append(character)
    return "".join(kept) + "..."


def _writable(text: str) -> str:
    """Makes text from a client valid UTF-8: replaces lone surrogates by question marks."""
    return text.encode(errors="replace").decode()


class InvalidArgument(StatusError):
    code, reason = Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"


class NotFound(StatusError):
    code, reason = Code.NOT_FOUND, "NOT_FOUND"


class AlreadyExists(StatusError):
    code, reason = Code.ALREADY_EXISTS, "ALREADY_EXISTS"


class FailedPrecondition(StatusError):
    code, reason = Code.FAILED_PRECONDITION, "CAPABILITY_MISSING"


class Cancelled(StatusError):
    code, reason = Code.CANCELLED, "CANCELLED"


class OutOfRange(StatusError):
    code, reason = Code.OUT_OF_RANGE, "OUT_OF_RANGE"


class Unauthenticated(StatusError):
    code, reason = Code.UNAUTHENTICATED, "UNAUTHENTICATED"


class PermissionDenied(StatusError):
    code, reason = Code.PERMISSION_DENIED, "PERMISSION_DENIED"


class ResourceExhausted(StatusError):
    code, reason = Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"


class Unavailable(StatusError):
    code, reason = Code.UNAVAILABLE, "UNAVAILABLE"


def draining() -> Unavailable:
    """The error for new requests while the server shuts down."""
    return Unavailable("the server is shutting down", reason="DRAINING", retry_after=1.0)


class DeadlineExceeded(StatusError):
    code, reason = Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class Internal(StatusError):
    code, reason = Code.INTERNAL, "INTERNAL"


class Unimplemented(StatusError):
    code, reason = Code.UNIMPLEMENTED, "UNIMPLEMENTED"


# Exceptions of other modules that may end a call: (class, status error, reason, whether the client may see its text).
FOREIGN: tuple[tuple[type[BaseException], type[StatusError], str, bool], ...] = (
    (ImageError, InvalidArgument, "IMAGE_DECODE_FAILED", True),
    (EngineDied, Unavailable, "ENGINE_DIED", True),
    (TimeoutError, DeadlineExceeded, "DEADLINE_EXCEEDED", False),
    (DecodeError, InvalidArgument, "MALFORMED_MESSAGE", False),
)
_HIDDEN = {
    "DEADLINE_EXCEEDED": "the call took longer than its time limit",
    "MALFORMED_MESSAGE": "the request is not a valid message of the type that this method takes",
}
"""Sent instead of the text of an exception that clients may not see."""


def to_status(error: BaseException) -> StatusError:
    """Converts any exception to the status error that ends the call."""
    if isinstance(error, StatusError):
        return error
    for kind, target, reason, shown in FOREIGN:
        if isinstance(error, kind):
            return target(str(error) if shown else _HIDDEN[reason], reason=reason)
    return Internal("the server failed on this request; its log has the details under the request id")
