"""gRPC statuses: details that can be read back, and trailers of limited size."""

from __future__ import annotations

import base64

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from service.common import errors
from service.rpc.statuses import trailers


@given(st.text(max_size=3000), st.text(max_size=3000), st.text(max_size=500), st.text(max_size=128))
def test_trailers_stay_under_the_limit(message: str, field: str, value: str, request_id: str) -> None:
    error = errors.ResourceExhausted(
        message, field=field, metadata={"a": value, "b": value}, retry_after=1.5, quota="tokens_per_minute"
    )
    found = trailers(error, request_id)
    size = sum(len(k) + len(base64.b64encode(v) if isinstance(v, bytes) else v) for k, v in found)
    assert size + len(error.message.encode()) * 3 < 8192 - 512


def test_details_can_be_read_back() -> None:
    error = errors.ResourceExhausted(
        "no", reason="RATE_LIMITED", retry_after=1.5, quota="requests_per_minute", field="a.b"
    )
    found = dict(trailers(error, "id-1"))
    assert found["grpc-retry-pushback-ms"] == "1500"
    status = status_pb2.Status.FromString(found["grpc-status-details-bin"])
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] == code_pb2.RESOURCE_EXHAUSTED
    kinds = [error_details_pb2.ErrorInfo(), error_details_pb2.RequestInfo(), error_details_pb2.BadRequest(),
             error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()]  # fmt: skip
    assert [packed.Unpack(kind) for packed, kind in zip(status.details, kinds, strict=True)] == [True] * 5
    assert kinds[0].reason == "RATE_LIMITED" and kinds[1].request_id == "id-1"
    assert dict(trailers(errors.Unavailable("x", never_retry=True), ""))["grpc-retry-pushback-ms"] == "-1"
    both = dict(trailers(errors.Unavailable("x", never_retry=True, retry_after=2.0), ""))
    assert both["grpc-retry-pushback-ms"] == "-1"
    assert dict(trailers(errors.Unavailable("x", retry_after=0.0), ""))["grpc-retry-pushback-ms"] == "0"
    assert "grpc-retry-pushback-ms" not in dict(trailers(errors.Unavailable("x"), ""))
    plain = status_pb2.Status.FromString(dict(trailers(errors.Unavailable("x"), ""))["grpc-status-details-bin"])
    assert len(plain.details) == 2 and plain.message == "x"


def test_grpc_has_every_code() -> None:
    assert {code.name: code.value for code in errors.Code}.items() <= {
        code.name: code.value[0] for code in grpc.StatusCode
    }.items()


def test_half_a_character_does_not_keep_a_status_from_leaving() -> None:
    trailers(errors.NotFound("a\ud800b", field="\udfff", metadata={"a": "\ud800"}), "id")
