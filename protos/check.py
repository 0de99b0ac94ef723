"""Checks the project's protos by their descriptors: buf's STANDARD rules, and compatibility with the last release.

python protos/check.py            runs both checks; protos/released.binpb describes the last release
python protos/check.py --release  records the present protos as the release with which later ones are compared
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

PROTOS = Path(__file__).resolve().parent
RELEASED = PROTOS / "released.binpb"
PRIVATE = {"saccade/v1/encoder.proto"}
"""Used only between servers of the same release, so that incompatible changes are allowed."""
_PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_CONSTANT = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")


def compile_protos() -> descriptor_pb2.FileDescriptorSet:
    """All files of saccade.v1, comments included."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "saccade" / "v1").glob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        target = f"{folder}/set"
        arguments = [f"-I{PROTOS}", f"-I{well_known}", "--include_source_info", f"--descriptor_set_out={target}"]
        if protoc.main(["protoc", *arguments, *sources]) != 0:
            raise SystemExit("protoc failed")
        return descriptor_pb2.FileDescriptorSet.FromString(Path(target).read_bytes())


def _messages(prefix: str, messages: Any) -> Iterator[tuple[str, Any]]:
    for message in messages:
        yield f"{prefix}.{message.name}", message
        yield from _messages(f"{prefix}.{message.name}", message.nested_type)


def _enums(file: Any) -> Iterator[tuple[str, Any]]:
    yield from ((f"{file.package}.{enum.name}", enum) for enum in file.enum_type)
    for name, message in _messages(file.package, file.message_type):
        yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)


# -- breaking changes --------------------------------------------------------------------------------------------------


def surface(files: descriptor_pb2.FileDescriptorSet) -> dict[str, str]:
    """Each element of the protos on which a client can depend -> its description. An element is unchanged if its
    descriptions before and after are equal."""
    found: dict[str, str] = {}
    for file in files.file:
        if file.name in PRIVATE:
            continue
        found[f"file {file.name}"] = f"package {file.package}"
        for name, message in _messages(file.package, file.message_type):
            found[f"message {name}"] = f"in {file.name}"
            for field in message.field:
                kind = field.type_name or descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
                label = descriptor_pb2.FieldDescriptorProto.Label.Name(field.label)
                group = ""
                if field.HasField("oneof_index"):
                    oneof = message.oneof_decl[field.oneof_index].name
                    group = "optional" if field.proto3_optional else f"of {oneof}"
                found[f"field {field.number} of {name}"] = " ".join((field.name, kind, label, field.json_name, group))
        for name, enum in _enums(file):
            found[f"enum {name}"] = f"in {file.name}"
            found |= {f"value {value.number} of {name}": value.name for value in enum.value}
        for service in file.service:
            found[f"service {service.name}"] = f"in {file.name}"
            for method in service.method:
                streams = f"{method.client_streaming} {method.server_streaming}"
                found[f"method {service.name}.{method.name}"] = f"{method.input_type} {method.output_type} {streams}"
    return found


def breaking(old: descriptor_pb2.FileDescriptorSet, new: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """Incompatible changes from `old` to `new`. Additions are compatible."""
    before, after = surface(old), surface(new)
    return [
        f"{thing} was `{words}` and is `{after[thing]}`" if thing in after else f"{thing} is gone (`{words}`)"
        for thing, words in before.items()
        if after.get(thing) != words
    ]


# -- lint --------------------------------------------------------------------------------------------------------------


def lint(files: descriptor_pb2.FileDescriptorSet) -> list[str]:
    """Violations of those of buf's STANDARD rules that apply to a single package."""
    return [problem for file in files.file for problem in _lint_file(file)]


def _lint_file(file: Any) -> Iterator[str]:
    folder, _, name = file.name.rpartition("/")
    if folder.replace("/", ".") != file.package:
        yield f"{file.name}: PACKAGE_DIRECTORY_MATCH: package {file.package}"
    if not re.fullmatch(r".*\.v[1-9][0-9]*", file.package):
        yield f"{file.name}: PACKAGE_VERSION_SUFFIX: package {file.package}"
    if not _SNAKE.fullmatch(name.removesuffix(".proto")):
        yield f"{file.name}: FILE_LOWER_SNAKE_CASE"
    if file.syntax != "proto3":
        yield f"{file.name}: SYNTAX_SPECIFIED"
    if file.public_dependency:
        yield f"{file.name}: IMPORT_NO_PUBLIC"
    if unused := _unused_imports(file):
        yield f"{file.name}: IMPORT_USED: {', '.join(unused)}"
    for path, message in _messages(file.package, file.message_type):
        if message.options.map_entry:
            continue
        if not _PASCAL.fullmatch(message.name):
            yield f"{path}: MESSAGE_PASCAL_CASE"
        for part in (*message.field, *message.oneof_decl):
            if not _SNAKE.fullmatch(part.name.removeprefix("_")):
                yield f"{path}.{part.name}: FIELD_LOWER_SNAKE_CASE"
    for path, enum in _enums(file):
        yield from _lint_enum(path, enum)
    for service in file.service:
        yield from _lint_service(file.package, service)


def _unused_imports(file: Any) -> list[str]:
    """Imports of Google's files of which no field and no method uses a type."""
    used = {field.type_name for _, message in _messages("", file.message_type) for field in message.field}
    used |= {name for service in file.service for m in service.method for name in (m.input_type, m.output_type)}
    known = {"google/protobuf/struct.proto": ".google.protobuf.Struct"}
    unused = []
    for imported in file.dependency:
        stem = imported.rpartition("/")[2].removesuffix(".proto")
        name = known.get(imported, f".google.protobuf.{stem.capitalize()}")
        if imported.startswith("google/") and name not in used:
            unused.append(imported)
    return unused


def _lint_enum(path: str, enum: Any) -> Iterator[str]:
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    if not _PASCAL.fullmatch(enum.name):
        yield f"{path}: ENUM_PASCAL_CASE"
    if enum.value[0].number != 0 or enum.value[0].name != f"{prefix}UNSPECIFIED":
        yield f"{path}: ENUM_ZERO_VALUE_SUFFIX: {enum.value[0].name}"
    if len({value.number for value in enum.value}) != len(enum.value):
        yield f"{path}: ENUM_NO_ALLOW_ALIAS"
    for value in enum.value:
        if not value.name.startswith(prefix) or not _CONSTANT.fullmatch(value.name):
            yield f"{path}.{value.name}: ENUM_VALUE_PREFIX"


def _lint_service(package: str, service: Any) -> Iterator[str]:
    if not service.name.endswith("Service") or not _PASCAL.fullmatch(service.name):
        yield f"{service.name}: SERVICE_SUFFIX"
    for method in service.method:
        if not _PASCAL.fullmatch(method.name):
            yield f"{service.name}.{method.name}: RPC_PASCAL_CASE"
        for kind, name in (("REQUEST", method.input_type), ("RESPONSE", method.output_type)):
            # A message of its own for each request and response, so that each can be extended without affecting others.
            if name != f".{package}.{method.name}{kind.capitalize()}":
                yield f"{service.name}.{method.name}: RPC_{kind}_STANDARD_NAME: {name}"


def main(arguments: list[str]) -> int:
    files = compile_protos()
    if arguments == ["--release"]:
        public = [file for file in files.file if file.name not in PRIVATE]
        for file in public:
            file.ClearField("source_code_info")
        RELEASED.write_bytes(descriptor_pb2.FileDescriptorSet(file=public).SerializeToString(deterministic=True))
        return 0
    problems = lint(files) + breaking(descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes()), files)
    print("\n".join(problems) or "the protos follow the rules and are compatible with the last release")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
