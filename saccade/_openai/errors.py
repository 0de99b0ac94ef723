"""Converts errors to HTTP statuses and OpenAI's error objects."""

from __future__ import annotations

import re
from typing import Any

from saccade import errors
from saccade._openai.fields import CHAT, Rules, field_named
from saccade.errors import SaccadeError

_STATUS: dict[type[SaccadeError], int] = {
    errors.InvalidArgument: 400,
    errors.FailedPrecondition: 400,
    errors.OutOfRange: 400,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.NotFound: 404,
    errors.AlreadyExists: 409,
    errors.MessageTooLarge: 413,
    errors.RateLimited: 429,
    errors.Cancelled: 499,
    errors.Unimplemented: 501,
    errors.Unavailable: 503,
    errors.Overloaded: 503,
    errors.DeadlineExceeded: 504,
}
_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error",
    429: "rate_limit_error", 499: "request_cancelled", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_FIELD = re.compile(r"([a-z_]+(?:\[\d+\])*(?:\.\w+(?:\[\d+\])*)*): ")
_PATH = re.compile(r"(?<![\w'\"/.-])(?:chat|sampling|header)(?:\.\w+(?:\[\d+\])*)+")
"""The path of a field in a gRPC message, within a text; a quoted name of a model may look like one."""


def status_code(error: SaccadeError) -> int:
    """The HTTP status for OpenAI's format."""
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


def is_transient(status: int) -> bool:
    """Whether a row that failed with this status should be tried again in a later run."""
    return status in (401, 403, 429, 499) or (status >= 500 and status != 501)


def error_type(status: int) -> str:
    """OpenAI's error type for a status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def in_words(error: SaccadeError, rules: Rules) -> str:
    """The error's message with the request's own names of fields."""
    field = field_named(error.field, rules)
    bare, message = error.field.removeprefix("sampling."), error.message
    counted = bare in ("images", "videos")  # in all messages, so the field at fault is not what the message is about
    if bare and not counted and re.match(rf"{re.escape(bare)}(?![\w.\[])", message):
        message = field + message[len(bare) :]
    if message.endswith(note := f" [{error.field}]"):
        message = f"{message.removesuffix(note)} [{field}]"
    return _PATH.sub(lambda path: field_named(path[0], rules), message)


def field_in(message: str) -> str:
    """The field with which an error's message begins; empty without one."""
    named = _FIELD.match(message)
    return named[1] if named else ""


def error_object(error: SaccadeError, status: int, rules: Rules = CHAT) -> dict[str, Any]:
    """OpenAI's error object. `code` is the error's reason, and `param` the field at fault: the error's, or the one with
    which its message begins. `rules`: those for the fields of this kind of request, with which its message names them
    too."""
    field = field_named(error.field or field_in(error.message), rules)
    return {
        "message": in_words(error, rules),
        "type": error_type(status),
        "param": field if field and status < 500 else None,
        "code": error.reason or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper(),
        "request_id": error.request_id or None,
    }
