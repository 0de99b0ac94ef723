"""Statuses: every error class has one, no text of other exceptions is sent, and texts are shortened and made valid."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from encoder.media_limits import ImageError
from service.common import errors
from service.common.errors import EngineDied

SUBCLASSES = errors.StatusError.__subclasses__()


@pytest.mark.parametrize("kind", SUBCLASSES, ids=lambda kind: kind.__name__)
def test_each_class_has_its_own_code(kind: type[errors.StatusError]) -> None:
    assert kind.code.name.replace("_", "") == kind.__name__.upper()
    assert [k for k in SUBCLASSES if k.code is kind.code] == [kind]
    assert errors.to_status(kind("x")).code is kind.code


def test_codes_are_those_of_google_rpc() -> None:
    assert {code.name: code.value for code in errors.Code} == {
        name: value for name, value in code_pb2.Code.items() if name in errors.Code.__members__
    }
    assert {kind.code for kind in SUBCLASSES} == set(errors.Code)


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


def test_long_texts_are_cut_where_they_must_be_and_not_before() -> None:
    assert errors.NotFound("x" * errors.MAX_MESSAGE).message == "x" * errors.MAX_MESSAGE
    assert errors.NotFound("x" * (errors.MAX_MESSAGE + 1)).message == "x" * (errors.MAX_MESSAGE - 3) + "..."
    error = errors.NotFound("x", field="f" * 200, metadata={"a": "v" * 200})
    assert len(error.field or "") == len(error.metadata["a"]) == errors.MAX_METADATA
    assert errors.NotFound("x", field="").field == "" and errors.NotFound("x").field is None


def test_half_a_character_does_not_keep_a_status_from_leaving() -> None:
    error = errors.NotFound("a\ud800b", field="\udfff", metadata={"a": "\ud800"})
    assert (error.message, error.field, error.metadata) == ("a?b", "?", {"a": "?"})
