"""Writes the parts of the documentation that are made of the sources, between their markers:

docs/api.md          services, methods and messages, from the protos and their comments
docs/operations.md   the table of options, from service/config.py

`python docs/generate.py [FOLDER]`: into FOLDER instead of this one. `make protos` runs it too.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
CHECKOUT = DOCS.parent
PROTOS = CHECKOUT / "protos"
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


def replace_between(text: str, name: str, body: str) -> str:
    """`text` with `body` between the markers of `name`. ValueError where they are not."""
    begin, end = f"<!-- begin {name}: written by docs/generate.py -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the markers of {name!r} are missing")
    return f"{before}{begin}\n{body.strip()}\n\n{end}{after}"


# -- protos ------------------------------------------------------------------------------------------------------------


def _descriptors() -> list[Any]:
    """FileDescriptorProtos of saccade.v1, comments included."""
    sys.path.insert(0, str(PROTOS))
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
    yield f"#### {message.name}\n"
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


def api() -> str:
    """The reference of all services, then of all messages, by file."""
    lines: list[str] = []
    for file in _descriptors():
        comments = _comments(file)
        lines.append(f"### {file.name}\n")
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
            lines.append(f"#### {enum.name}\n")
            lines.append("| value | |\n| --- | --- |")
            lines += [
                f"| `{value.name}` = {value.number} | {comments.get((5, e, 2, v), '')} |"
                for v, value in enumerate(enum.value)
            ]
            lines.append("")
        for m, message in enumerate(file.message_type):
            lines += _message(message, (4, m), comments)
    return "\n".join(lines)


# -- options -----------------------------------------------------------------------------------------------------------


def options() -> str:
    """The table of all options of `saccade serve`."""
    sys.path.insert(0, str(CHECKOUT))
    from service.config import ServerOptions, flag_of, value_words

    lines = ["| option | value | default | |", "| --- | --- | --- | --- |"]
    for spec in dataclasses.fields(ServerOptions):
        default = "off" if isinstance(spec.default, bool) else "" if spec.default in (None, ()) else spec.default
        name = "MODEL" if spec.name == "model" else flag_of(spec)
        lines.append(f"| `{name}` | {value_words(ServerOptions, spec)} | {default} | {spec.metadata['help']} |")
    return "\n".join(lines)


def main(folder: Path) -> None:
    for file, name, body in (("api.md", "reference", api()), ("operations.md", "options", options())):
        text = (DOCS / file).read_text("utf-8")
        (folder / file).write_text(replace_between(text, name, body), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
