"""Every way a call can fail: one table from exception class to gRPC status, reason and retry advice.

Our own refusals are `StatusError`s. What else may reach the top of a call is listed in `FOREIGN`; anything that is in
neither is INTERNAL, and its text stays in the server's log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError

from encoder.images import ImageError

DOMAIN = "saccade"
MAX_MESSAGE = 1024
"""Bytes of a status message as it travels, percent-encoded: trailers above the peer's limit (8 KiB is common) would
replace the status by RESOURCE_EXHAUSTED, and the message is in them up to three times."""
MAX_METADATA = 128
"""Characters of one value of ErrorInfo's metadata, and of a field's path."""


class EngineDied(RuntimeError):
    """The engine process ended."""


class StatusError(Exception):
    """A call's end with a status other than OK."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    reason: str = "INTERNAL"

    def __init__(
        self, message: str, *, reason: str | None = None, field: str | None = None,
        metadata: Mapping[str, str] | None = None, retry_after: float | None = None, quota: str | None = None,
        never_retry: bool = False,
    ) -> None:  # fmt: skip
        """`field`: path of the request field at fault. `retry_after`: seconds; None means that a retry will not help.
        `quota`: what has run out. `never_retry`: tells clients so even where the code alone would invite a retry."""
        super().__init__(message)
        self.message = _short(message)
        self.reason = reason or type(self).reason
        self.field = _writable(field[:MAX_METADATA]) if field else field
        self.metadata = {name: _writable(str(value)[:MAX_METADATA]) for name, value in (metadata or {}).items()}
        self.retry_after = retry_after
        self.quota = quota
        self.never_retry = never_retry


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
    """What a client may have put into a message need not be UTF-8: half a surrogate pair becomes a question mark."""
    return text.encode(errors="replace").decode()


class InvalidArgument(StatusError):
    code, reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"


class NotFound(StatusError):
    code, reason = grpc.StatusCode.NOT_FOUND, "NOT_FOUND"


class AlreadyExists(StatusError):
    code, reason = grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"


class FailedPrecondition(StatusError):
    code, reason = grpc.StatusCode.FAILED_PRECONDITION, "CAPABILITY_MISSING"


class Cancelled(StatusError):
    code, reason = grpc.StatusCode.CANCELLED, "CANCELLED"


class OutOfRange(StatusError):
    code, reason = grpc.StatusCode.OUT_OF_RANGE, "OUT_OF_RANGE"


class Unauthenticated(StatusError):
    code, reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class PermissionDenied(StatusError):
    code, reason = grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"


class ResourceExhausted(StatusError):
    code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"


class Unavailable(StatusError):
    code, reason = grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"


def draining() -> Unavailable:
    """What new work is told while the server shuts down."""
    return Unavailable("the server is shutting down", reason="DRAINING", retry_after=1.0)


class DeadlineExceeded(StatusError):
    code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class Internal(StatusError):
    code, reason = grpc.StatusCode.INTERNAL, "INTERNAL"


class Unimplemented(StatusError):
    code, reason = grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED"


# Exceptions of other modules that may end a call: (class, status error, reason, whether its text may be shown)
FOREIGN: tuple[tuple[type[BaseException], type[StatusError], str, bool], ...] = (
    (ImageError, InvalidArgument, "IMAGE_DECODE_FAILED", True),
    (EngineDied, Unavailable, "ENGINE_DIED", True),
    (TimeoutError, DeadlineExceeded, "DEADLINE_EXCEEDED", False),
    (asyncio.TimeoutError, DeadlineExceeded, "DEADLINE_EXCEEDED", False),
    (DecodeError, InvalidArgument, "MALFORMED_MESSAGE", False),
)
_HIDDEN = {
    "DEADLINE_EXCEEDED": "the call took longer than it was allowed to",
    "MALFORMED_MESSAGE": "the request is not a message of the type that this method takes",
}
"""What is said instead of the text of an exception that may not be shown."""


def to_status(error: BaseException) -> StatusError:
    """Any exception -> the status error that ends the call."""
    if isinstance(error, StatusError):
        return error
    for kind, target, reason, shown in FOREIGN:
        if isinstance(error, kind):
            return target(str(error) if shown else _HIDDEN[reason], reason=reason)
    return Internal("the server failed on this request; its log has the details under the request id")


def has_details() -> bool:
    """Whether clients can be told reasons, fields and times to wait: googleapis-common-protos is installed."""
    try:
        from google.rpc import error_details_pb2, status_pb2  # noqa: F401
    except ImportError:
        return False
    return True


def details(error: StatusError, request_id: str) -> bytes | None:
    """The `grpc-status-details-bin` trailer: google.rpc.Status with ErrorInfo, RequestInfo and, where they apply,
    BadRequest and RetryInfo. None where googleapis-common-protos is not installed."""
    if not has_details():
        return None
    from google.protobuf.any_pb2 import Any
    from google.rpc import error_details_pb2, status_pb2

    entries: list[object] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    if error.field is not None:
        wrong = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        entries.append(error_details_pb2.BadRequest(field_violations=[wrong]))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after * 1000))
        entries.append(retry)
    if error.quota is not None:
        violation = error_details_pb2.QuotaFailure.Violation(subject=error.quota, description=error.reason)
        entries.append(error_details_pb2.QuotaFailure(violations=[violation]))
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for entry in entries:
        packed = Any()
        packed.Pack(entry)
        status.details.append(packed)
    return bytes(status.SerializeToString())


def trailers(error: StatusError, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata of a call that ends with `error`."""
    entries: list[tuple[str, str | bytes]] = []
    if (packed := details(error, request_id)) is not None:
        entries.append(("grpc-status-details-bin", packed))
    if error.never_retry:
        entries.append(("grpc-retry-pushback-ms", "-1"))
    elif error.retry_after is not None:
        entries.append(("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))))
    return tuple(entries)
