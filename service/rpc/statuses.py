"""Converts `StatusError`s to gRPC: a code, a message and trailers."""

from __future__ import annotations

from typing import Any

import grpc

from service.common import errors

DOMAIN = "saccade"


async def abort(context: Any, error: errors.StatusError) -> None:
    """Ends the call of a `grpc.aio.ServicerContext` with the status of `error`. Does not return."""
    await context.abort(grpc.StatusCode[error.code.name], error.message, trailers(error, error.request_id))


def has_details() -> bool:
    """Whether clients can be sent reasons, fields and retry delays: googleapis-common-protos is installed."""
    try:
        from google.rpc import error_details_pb2, status_pb2  # noqa: F401
    except ImportError:
        return False
    return True


def details(error: errors.StatusError, request_id: str) -> bytes | None:
    """The `grpc-status-details-bin` trailer: google.rpc.Status with ErrorInfo, RequestInfo and, where they apply,
    BadRequest, RetryInfo and QuotaFailure. None if googleapis-common-protos is not installed."""
    if not has_details():
        return None
    from google.protobuf import any_pb2
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
    status = status_pb2.Status(code=error.code.value, message=error.message)
    for entry in entries:
        packed = any_pb2.Any()
        packed.Pack(entry)
        status.details.append(packed)
    return bytes(status.SerializeToString())


def trailers(error: errors.StatusError, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata of a call that ends with `error`."""
    entries: list[tuple[str, str | bytes]] = []
    if (packed := details(error, request_id)) is not None:
        entries.append(("grpc-status-details-bin", packed))
    if error.never_retry:
        entries.append(("grpc-retry-pushback-ms", "-1"))
    elif error.retry_after is not None:
        entries.append(("grpc-retry-pushback-ms", str(round(error.retry_after * 1000))))
    return tuple(entries)
