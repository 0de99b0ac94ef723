"""All errors that the client raises, and the conversion of gRPC statuses to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OVERLOADED_REASONS = frozenset({"QUEUE_FULL", "WARMING", "DRAINING"})
# The server could not fetch a URL: the call would fail in the same way until the URL's host answers again.
_NOT_RETRYABLE_REASONS = frozenset({"MEDIA_FETCH_FAILED"})
# The message of Ray Serve's ingress about a replica that died or could not be reached during a call.
_SERVE_REPLICA_LOST = re.compile(r"The actor .*(died|is dead|unavailable)")
_NO_HANDSHAKE = "Failed to create security handshaker"
"""Part of gRPC's message if a channel's certificates or key cannot be used. It never reads them again, so a retry would
fail in the same way."""
_TIMED_OUT = "Deadline Exceeded"
"""Part of gRPC's messages about a call whose timeout has passed, such as `Stream removed (Deadline Exceeded)`."""
_STOPPED = frozenset({"", "CANCELLED"})
"""gRPC's messages about a call that arrived just as the server stopped, which reads no more calls then. A call that
this client cancels has another message, and one that the server ends as cancelled has a reason."""
_STATUS_DETAILS = "grpc-status-details-bin"
_PUSHBACK = "grpc-retry-pushback-ms"
_PUSHBACK_MS = re.compile("[0-9]{1,18}")
"""A time to wait that gRPC reads: it has 64 bits."""


class SaccadeError(Exception):
    """The base class of all errors.

    `reason` is a stable identifier for programs (QUEUE_FULL, IMAGE_DECODE_FAILED, ...), empty if the server gave none.
    `retryable` says whether the same call may succeed later; `retry_after` is the time in seconds that the server asks
    to wait, if any. `metadata` has further details of the reason (limits and counts, as strings). `field` is the path
    of the request's field at fault, empty if it is unknown. For an error over gRPC, `__cause__` is the original
    `grpc.RpcError`.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        request_id: str = "",
        retryable: bool = False,
        retry_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        field: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.request_id = request_id
        self.retryable = retryable
        self.retry_after = retry_after
        self.metadata = dict(metadata or {})
        self.field = field

    def __str__(self) -> str:
        notes = [note for note in (self.reason, self.request_id and f"request {self.request_id}") if note]
        return f"{self.message} ({', '.join(notes)})" if notes else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own method rebuilds from the positional arguments only and would lose the rest.
        return type(self), (self.message,), self.__dict__


class InvalidArgument(SaccadeError):
    """The request is invalid; found by the client or by the server."""


class NotFound(SaccadeError):
    """There is no such model, media or batch."""


class AlreadyExists(SaccadeError):
    """The request id is in use by another request, or the output file of a batch has other content."""


class FailedPrecondition(SaccadeError):
    """The model, or the present state of the server, of the client or of a file, does not allow the call."""


class OutOfRange(SaccadeError):
    """A position is past the end, or an answer was cut off before its format was complete."""


class Unimplemented(SaccadeError):
    """The server, or `LocalClient`, does not implement this call."""


class Overloaded(SaccadeError):
    """The server is full, still warming up or about to stop: retry later."""


class RateLimited(SaccadeError):
    """The rate limit or a quota of this key, or the server's space for uploads, is exhausted for now."""


class Unauthenticated(SaccadeError):
    """The credentials are missing or invalid."""


class PermissionDenied(SaccadeError):
    """The credentials are valid but do not allow this call."""


class DeadlineExceeded(SaccadeError):
    """The call's timeout, or the time limit of a stream's next part, has passed."""


class Cancelled(SaccadeError):
    """The call was cancelled."""


class MessageTooLarge(SaccadeError):
    """A message is larger than the receiver accepts. Sending it again cannot help."""


class Unavailable(SaccadeError):
    """The server cannot be reached, or the connection was lost during the call."""


class Internal(SaccadeError):
    """The server failed. Its log has the cause under the request id."""


_BY_CODE: dict[str, type[SaccadeError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": FailedPrecondition,
    "OUT_OF_RANGE": OutOfRange,
    "UNIMPLEMENTED": Unimplemented,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "RESOURCE_EXHAUSTED": RateLimited,
    "UNAVAILABLE": Unavailable,
}


@dataclass
class StatusDetails:
    """The details of a status besides its code and message."""

    reason: str = ""
    request_id: str = ""
    retry_after: float | None = None
    no_retry: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    fields: list[tuple[str, str]] = field(default_factory=list)


def error_from_status(code: str, message: str, details: StatusDetails, *, request_id: str = "") -> SaccadeError:
    """The error for a gRPC status.

    Args:
        code: the status code's name, for instance "UNAVAILABLE".
        request_id: the caller's own id for the request, used if the status has none.
    """
    kind = _kind(code, message, details.reason)
    message = _with_fields(message, details.fields)
    retryable = not details.no_retry and (
        (kind in (Unavailable, Overloaded) and details.reason not in _NOT_RETRYABLE_REASONS)
        or (kind is RateLimited and (details.reason == "RATE_LIMITED" or details.retry_after is not None))
    )
    return kind(
        message or code,
        reason=details.reason,
        request_id=details.request_id or request_id,
        retryable=retryable,
        retry_after=details.retry_after,
        metadata=details.metadata,
        field=details.fields[0][0] if details.fields else "",
    )


def error_from_service(error: Any, request_id: str) -> SaccadeError:
    """Converts a `service.common.errors.StatusError`."""
    details = StatusDetails(
        reason=error.reason,
        retry_after=getattr(error, "retry_after", None),
        metadata={str(key): str(value) for key, value in (getattr(error, "metadata", None) or {}).items()},
        no_retry=bool(getattr(error, "never_retry", False)),
        fields=[(name, "") for name in [getattr(error, "field", None)] if name],
    )
    return error_from_status(error.code.name, error.message, details, request_id=request_id)


def _with_fields(message: str, fields: list[tuple[str, str]]) -> str:
    """The message, followed by the names and descriptions of invalid fields that it does not contain itself."""
    notes = []
    for name, description in fields:
        unsaid = [] if name.rpartition(".")[2] in message else [name]
        notes.append(": ".join(unsaid + ([description] if description and description not in message else [])))
    notes = [note for note in notes if note]
    return f"{message} [{'; '.join(notes)}]" if notes else message


def _kind(code: str, message: str, reason: str) -> type[SaccadeError]:
    if code == "UNAVAILABLE" and reason in OVERLOADED_REASONS:
        return Overloaded
    if code == "RESOURCE_EXHAUSTED" and not reason:
        # gRPC itself uses this code for three conditions, without details.
        if "larger than max" in message:
            return MessageTooLarge
        if "Concurrent RPC limit" in message:
            return Overloaded
        if "metadata size exceeds" in message:
            return Internal
    if code == "RESOURCE_EXHAUSTED" and reason == "MESSAGE_TOO_LARGE":
        return MessageTooLarge
    if code == "INTERNAL" and not reason and _SERVE_REPLICA_LOST.match(message):
        return Unavailable
    return _BY_CODE.get(code, Internal)


def error_from_rpc(rpc_error: Any, *, request_id: str = "") -> SaccadeError:
    """Converts a `grpc.RpcError` that is also a call (sync or aio); it becomes the error's `__cause__`."""
    trailers = _items(rpc_error.trailing_metadata())
    code, message = rpc_error.code().name, rpc_error.details() or ""
    details = parse_trailers(trailers)
    if code == "UNAVAILABLE" and (hint := _connection_hint(message)):
        details.no_retry = details.no_retry or _NO_HANDSHAKE in message
        message = f"{message.rstrip('.')}; {hint}"
    if code == "CANCELLED" and not details.reason and message in _STOPPED:
        code, message = "UNAVAILABLE", "the server stopped before it had read the call (CANCELLED)"
    if code == "DEADLINE_EXCEEDED" and _TIMED_OUT in message:
        message = "the timeout of the call has passed"
        details.reason = details.reason or code  # as if the server's answer had come first
    error = error_from_status(code, message, details, request_id=request_id)
    error.__cause__ = rpc_error
    return error


def _connection_hint(message: str) -> str:
    """A hint for gRPC's message about a failed connection: about TLS, or the wrong port. Empty if there is none."""
    if not message.startswith("failed to connect"):
        return ""
    if "http1.x server" in message:
        return "the address may be that of the HTTP server: this client needs the port for gRPC"
    if "WRONG_VERSION_NUMBER" in message:
        return "the server may not use TLS: connect without it"
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return "the server's certificate is not signed by a trusted CA"
    if "Hostname Verification Check failed" in message:
        return "the server's certificate is not for this name; TLSConfig(server_name=...) sets another one"
    if _NO_HANDSHAKE in message:
        return "the client's own certificate or key cannot be used, or they do not belong together"
    if message.endswith("Socket closed"):  # by the server, during the handshake
        return "the server may expect TLS, or a client certificate"
    return ""


def _items(metadata: Any) -> list[tuple[str, str | bytes]]:
    return [(str(key), value) for key, value in metadata or ()]


def parse_trailers(trailers: list[tuple[str, str | bytes]]) -> StatusDetails:
    """Reads google.rpc.Status and the retry pushback from trailing metadata; anything unreadable is ignored."""
    details = StatusDetails()
    for key, value in trailers:
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            _parse_status(value, details)
    for key, value in trailers:
        if key == _PUSHBACK:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            # gRPC's own rule: a negative or unreadable number means "do not try again".
            if not _PUSHBACK_MS.fullmatch(text.strip()):
                details.no_retry = True
            elif details.retry_after is None:
                details.retry_after = int(text) / 1000
    return details


def _parse_status(data: bytes, details: StatusDetails) -> None:
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    request = error_details_pb2.RequestInfo()
    try:
        for packed in status_pb2.Status.FromString(data).details:
            if packed.Unpack(info):
                details.reason = info.reason
                details.metadata.update(info.metadata)
            elif packed.Unpack(bad_request):
                details.fields += [(v.field, v.description) for v in bad_request.field_violations]
            elif packed.Unpack(retry):
                details.retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
            elif packed.Unpack(request):
                details.request_id = request.request_id
    except DecodeError:
        return
