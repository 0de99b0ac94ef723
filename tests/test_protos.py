"""The wire contract: buf's rules, and no change that breaks a client built for the last release."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

_spec = importlib.util.spec_from_file_location("check", Path(__file__).resolve().parents[1] / "protos" / "check.py")
assert _spec is not None and _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)


@pytest.fixture(scope="module")
def compiled() -> descriptor_pb2.FileDescriptorSet:
    files: descriptor_pb2.FileDescriptorSet = check.compile_protos()
    return files


def released() -> descriptor_pb2.FileDescriptorSet:
    return descriptor_pb2.FileDescriptorSet.FromString(check.RELEASED.read_bytes())


def test_nothing_that_was_released_has_changed(compiled: descriptor_pb2.FileDescriptorSet) -> None:
    assert check.breaking(released(), compiled) == []
    assert len(released().file) >= 6 and check.surface(released())["service InferenceService"]


def test_the_protos_keep_to_bufs_rules(compiled: descriptor_pb2.FileDescriptorSet) -> None:
    assert check.lint(compiled) == []


def _find(files: Any, name: str) -> Any:
    return next(
        m for file in files.file for m in (*file.message_type, *file.enum_type, *file.service) if m.name == name
    )


def _field(files: Any, message: str, name: str) -> Any:
    return next(field for field in _find(files, message).field if field.name == name)


CHANGES: dict[str, Callable[[Any], None]] = {
    "field 1 of saccade.v1.Delta is gone": lambda f: _find(f, "Delta").field.remove(_field(f, "Delta", "index")),
    "field 2 of saccade.v1.Delta is gone": lambda f: setattr(_field(f, "Delta", "text"), "number", 77),
    "field 2 of saccade.v1.Delta was": lambda f: setattr(_field(f, "Delta", "text"), "type", 12),
    "field 3 of saccade.v1.Delta was": lambda f: setattr(_field(f, "Delta", "token_ids"), "label", 1),
    "field 6 of saccade.v1.GenerateRequest was": lambda f: setattr(
        _field(f, "GenerateRequest", "sampling"), "type_name", ".saccade.v1.Usage"
    ),
    "field 3 of saccade.v1.SamplingParams was": lambda f: setattr(
        _field(f, "SamplingParams", "temperature"), "name", "heat"
    ),
    "field 1 of saccade.v1.Image was": lambda f: _field(f, "Image", "data").ClearField("oneof_index"),
    "value 2 of saccade.v1.FinishReason was": lambda f: setattr(
        _find(f, "FinishReason").value[2], "name", "FINISH_REASON_LIMIT"
    ),
    "method InferenceService.Embed was": lambda f: setattr(
        _find(f, "InferenceService").method[2], "server_streaming", True
    ),
    "service BatchService is gone": lambda f: _drop_service(f, "BatchService"),
    "message saccade.v1.Usage was": lambda f: _move(f, "Usage"),
}


def _drop_service(files: Any, name: str) -> None:
    for file in files.file:
        for service in [s for s in file.service if s.name == name]:
            file.service.remove(service)


def _move(files: Any, name: str) -> None:
    """Moves it to another file, which changes its Python module."""
    (source,) = [file for file in files.file if any(m.name == name for m in file.message_type)]
    message = _find(files, name)
    next(file for file in files.file if file is not source).message_type.append(message)
    source.message_type.remove(message)


@pytest.mark.parametrize("problem", CHANGES)
def test_changes_that_break_clients_are_found(problem: str) -> None:
    changed = released()
    CHANGES[problem](changed)
    found = check.breaking(released(), changed)
    assert any(line.startswith(problem) for line in found), found


def test_additions_break_nobody() -> None:
    grown = released()
    _find(grown, "Delta").field.add(name="more", number=99, type=9, label=1, json_name="more")
    _find(grown, "FinishReason").value.add(name="FINISH_REASON_TIRED", number=9)
    grown.file[0].message_type.add(name="New")
    assert check.breaking(released(), grown) == []


WRONG = """
name: "saccade/v2/Bad-name.proto" package: "saccade.bad" syntax: "proto3"
dependency: "google/protobuf/duration.proto" public_dependency: 0
message_type { name: "lower_case" field { name: "CamelField" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL } }
message_type { name: "Shared" }
enum_type { name: "Kind" value { name: "KIND_OTHER" number: 0 } value { name: "WRONG" number: 1 } }
service { name: "Thing" method { name: "do" input_type: ".saccade.bad.Shared" output_type: ".saccade.bad.Shared" } }
"""
RULES = (
    "PACKAGE_DIRECTORY_MATCH", "PACKAGE_VERSION_SUFFIX", "FILE_LOWER_SNAKE_CASE", "IMPORT_NO_PUBLIC", "IMPORT_USED",
    "MESSAGE_PASCAL_CASE", "FIELD_LOWER_SNAKE_CASE", "ENUM_ZERO_VALUE_SUFFIX", "ENUM_VALUE_PREFIX", "SERVICE_SUFFIX",
    "RPC_PASCAL_CASE", "RPC_REQUEST_STANDARD_NAME", "RPC_RESPONSE_STANDARD_NAME",
)  # fmt: skip


def test_each_rule_can_fail() -> None:
    from google.protobuf import text_format

    wrong = text_format.Parse(WRONG, descriptor_pb2.FileDescriptorProto())
    problems = check.lint(descriptor_pb2.FileDescriptorSet(file=[wrong]))
    for rule in RULES:
        assert any(rule in problem for problem in problems), rule
