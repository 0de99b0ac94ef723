"""Statuses: every class has one, no foreign text leaves, and trailers stay small whatever is in them."""

from __future__ import annotations

import base64

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from encoder.images import ImageError
from service.common import errors
from service.common.errors import EngineDied

SUBCLASSES = errors.StatusError.__subclasses__()


@pytest.mark.parametrize("kind", SUBCLASSES, ids=lambda kind: kind.__name__)
def test_each_class_has_its_own_code(kind: type[errors.StatusError]) -> None:
    assert kind.code.name.replace("_", "") == kind.__name__.upper()
    assert [k for k in SUBCLASSES if k.code is kind.code] == [kind]
    assert errors.to_status(kind("x")).code is kind.code


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (ImageError("bad"), "INVALID_ARGUMENT", "IMAGE_DECODE_FAILED"),
        (TimeoutError("secret"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        (DecodeError("secret"), "INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
        (RuntimeError("secret"), "INTERNAL", "INTERNAL"),
        (KeyError("secret"), "INTERNAL", "INTERNAL"),
        (EngineDied("the engine stopped"), "UNAVAILABLE", "ENGINE_DIED"),
        (MemoryError("secret"), "INTERNAL", "INTERNAL"),
        (OSError(28, "secret"), "INTERNAL", "INTERNAL"),
    ],
)
def test_foreign_exceptions(error: Exception, code: str, reason: str) -> None:
    status = errors.to_status(error)
    assert (status.code.name, status.reason) == (code, reason)
    assert "secret" not in status.message


@given(st.text(max_size=3000), st.text(max_size=3000), st.text(max_size=500), st.text(max_size=128))
def test_trailers_stay_under_the_limit(message: str, field: str, value: str, request_id: str) -> None:
    error = errors.ResourceExhausted(
        message, field=field, metadata={"a": value, "b": value}, retry_after=1.5, quota="tokens_per_minute"
    )
    trailers = errors.trailers(error, request_id)
    size = sum(len(k) + len(base64.b64encode(v) if isinstance(v, bytes) else v) for k, v in trailers)
    assert size + len(error.message.encode()) * 3 < 8192 - 512


def test_details_can_be_read_back() -> None:
    error = errors.ResourceExhausted(
        "no", reason="RATE_LIMITED", retry_after=1.5, quota="requests_per_minute", field="a.b"
    )
    trailers = dict(errors.trailers(error, "id-1"))
    assert trailers["grpc-retry-pushback-ms"] == "1500"
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    kinds = [error_details_pb2.ErrorInfo(), error_details_pb2.RequestInfo(), error_details_pb2.BadRequest(),
             error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()]  # fmt: skip
    assert [packed.Unpack(kind) for packed, kind in zip(status.details, kinds, strict=True)] == [True] * 5
    assert kinds[0].reason == "RATE_LIMITED" and kinds[1].request_id == "id-1"
    assert dict(errors.trailers(errors.Unavailable("x", never_retry=True), ""))["grpc-retry-pushback-ms"] == "-1"
    both = dict(errors.trailers(errors.Unavailable("x", never_retry=True, retry_after=2.0), ""))
    assert both["grpc-retry-pushback-ms"] == "-1"
    assert dict(errors.trailers(errors.Unavailable("x", retry_after=0.0), ""))["grpc-retry-pushback-ms"] == "0"
    assert "grpc-retry-pushback-ms" not in dict(errors.trailers(errors.Unavailable("x"), ""))
    plain = status_pb2.Status.FromString(dict(errors.trailers(errors.Unavailable("x"), ""))["grpc-status-details-bin"])
    assert len(plain.details) == 2 and plain.message == "x"


def test_long_texts_are_cut_where_they_must_be_and_not_before() -> None:
    assert errors.NotFound("x" * errors.MAX_MESSAGE).message == "x" * errors.MAX_MESSAGE
    assert errors.NotFound("x" * (errors.MAX_MESSAGE + 1)).message == "x" * (errors.MAX_MESSAGE - 3) + "..."
    error = errors.NotFound("x", field="f" * 200, metadata={"a": "v" * 200})
    assert len(error.field or "") == len(error.metadata["a"]) == errors.MAX_METADATA
    assert errors.NotFound("x", field="").field == "" and errors.NotFound("x").field is None


def test_half_a_character_does_not_keep_a_status_from_leaving() -> None:
    error = errors.NotFound("a\ud800b", field="\udfff", metadata={"a": "\ud800"})
    assert (error.message, error.field, error.metadata) == ("a?b", "?", {"a": "?"})
    errors.trailers(error, "id")
