"""Tables of the gRPC API, from the protos and their comments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from . import CHECKOUT

_LEAF = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    8: "bool",
    9: "string",
    12: "bytes",
    13: "uint32",
}


def _descriptors() -> list[Any]:
    """FileDescriptorProtos of saccade.v1, comments included."""
    sys.path.insert(0, str(CHECKOUT / "protos"))
    from check import compile_protos

    return list(compile_protos().file)


def _comments(file: Any) -> dict[tuple[int, ...], str]:
    return {
        tuple(place.path): " ".join(place.leading_comments.split())
        for place in file.source_code_info.location
        if place.leading_comments
    }


def _type(field: Any, maps: dict[str, Any]) -> str:
    name: str = field.type_name.removeprefix(".saccade.v1.").removeprefix(".google.protobuf.")
    if (entry := maps.get(name.rpartition(".")[2])) is not None:
        return f"map<{_type(entry.field[0], {})}, {_type(entry.field[1], {})}>"
    plain = name or _LEAF.get(field.type, "?")
    return f"repeated {plain}" if field.label == 3 else f"optional {plain}" if field.proto3_optional else plain


def _message(message: Any, path: tuple[int, ...], comments: dict[tuple[int, ...], str]) -> Iterator[str]:
    yield f"### {message.name}\n"
    if text := comments.get(path):
        yield f"{text}\n"
    if not message.field:
        yield "No fields.\n"
        return
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    yield "| field | type | |\n| --- | --- | --- |"
    for index, field in enumerate(message.field):
        one_of = ""
        if field.HasField("oneof_index") and not field.proto3_optional:
            one_of = f"one of `{message.oneof_decl[field.oneof_index].name}`. "
        text = one_of + comments.get((*path, 2, index), "")
        yield f"| `{field.name}` = {field.number} | {_type(field, maps)} | {text.strip().replace('|', chr(92) + '|')} |"
    yield ""


def reference() -> str:
    """The reference, file by file: services, then enums, then messages."""
    lines: list[str] = []
    for file in _descriptors():
        comments = _comments(file)
        lines.append(f"## {file.name}\n")
        for s, service in enumerate(file.service):
            lines.append(f"**`{file.package}.{service.name}`** {comments.get((6, s), '')}\n")
            lines.append("| method | takes | gives | |\n| --- | --- | --- | --- |")
            for m, method in enumerate(service.method):
                takes, gives = (
                    ("stream of " if streaming else "") + name.rpartition(".")[2]
                    for streaming, name in (
                        (method.client_streaming, method.input_type),
                        (method.server_streaming, method.output_type),
                    )
                )
                lines.append(f"| `{method.name}` | {takes} | {gives} | {comments.get((6, s, 2, m), '')} |")
            lines.append("")
        for e, enum in enumerate(file.enum_type):
            lines.append(f"### {enum.name}\n")
            lines.append("| value | |\n| --- | --- |")
            lines += [
                f"| `{value.name}` = {value.number} | {comments.get((5, e, 2, v), '')} |"
                for v, value in enumerate(enum.value)
            ]
            lines.append("")
        for m, message in enumerate(file.message_type):
            lines += _message(message, (4, m), comments)
    return "\n".join(lines)


def services() -> str:
    """A row for each service of the protos: its name and the first sentence of its comment."""
    lines = ["| service | for |", "| --- | --- |"]
    for file in _descriptors():
        comments = _comments(file)
        for s, service in enumerate(file.service):
            sentence = comments.get((6, s), "").partition(". ")[0].rstrip(".:")
            lines.append(f"| `{file.package}.{service.name}` | {sentence} |")
    return "\n".join(lines)
