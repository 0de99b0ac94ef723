"""Writes the parts of the documentation that are made of the sources, between their markers:

docs/api.md          services, methods and messages, from the protos and their comments; the client's methods and
                     the reasons of errors, from the Python sources
docs/operations.md   the table of options, from service/common/config.py

`python docs/generate.py [FOLDER]`: into FOLDER instead of this one. `make protos` runs it too.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
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


def services() -> str:
    """A line for each service of the protos: its name and the first sentence about it."""
    lines = ["| service | for |", "| --- | --- |"]
    for file in _descriptors():
        comments = _comments(file)
        for s, service in enumerate(file.service):
            sentence = comments.get((6, s), "").partition(". ")[0].rstrip(".:")
            lines.append(f"| `{file.package}.{service.name}` | {sentence} |")
    return "\n".join(lines)


# -- Python ------------------------------------------------------------------------------------------------------------


def _raised(folder: str) -> Iterator[tuple[str, str, bool]]:
    """(class, reason, whether it says how long to wait) of each error that the sources of a package make."""
    for path in sorted((CHECKOUT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            for part in ast.walk(given.get("reason", ast.Constant(None))):
                value = getattr(part, "value", None) if isinstance(part, ast.Constant) else None
                value = constants.get(part.id) if isinstance(part, ast.Name) else value
                if isinstance(value, str) and value.isupper():
                    # f"{kind}_TOO_LARGE" is of images and of videos.
                    for kind in ("IMAGE", "VIDEO") if value.startswith("_") else ("",):
                        yield name, kind + value, "retry_after" in given


def reasons() -> str:
    """The table of what the server answers: by code, the reasons and whether to try again; from
    service/common/errors.py and whatever raises its classes."""
    sys.path.insert(0, str(CHECKOUT))
    from service.common import errors

    kinds = {name: kind for name, kind in vars(errors).items() if getattr(kind, "code", None) and name != "StatusError"}
    found = {(kind.code.name, kind.reason, False) for kind in kinds.values()}
    found |= {(target.code.name, reason, False) for _, target, reason, _ in errors.FOREIGN}
    found |= {(kinds[name].code.name, reason, wait) for name, reason, wait in _raised("service") if name in kinds}
    waits = {(code, reason) for code, reason, wait in found if wait}
    lines = ["| code | reasons | with a time to wait (RetryInfo) |", "| --- | --- | --- |"]
    for code in sorted({code for code, _, _ in found}):
        told = [sorted({r for c, r, _ in found if c == code and ((c, r) in waits) == wait}) for wait in (False, True)]
        lines.append(f"| {code} | {', '.join(told[0])} | {', '.join(told[1])} |")
    return "\n".join(lines)


def client_errors() -> str:
    """The classes of saccade.errors, and the reasons that the client itself gives."""
    sys.path.insert(0, str(CHECKOUT))
    from saccade import errors

    kinds = {n: k for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, errors.SaccadeError)}
    lines = ["| class | |", "| --- | --- |"]
    lines += [f"| `{name}` | {inspect.getdoc(kind).splitlines()[0]} |" for name, kind in kinds.items()]
    own = ", ".join(sorted({reason for _, reason, _ in _raised("saccade")}))
    return "\n".join([*lines, "", *textwrap.wrap(f"Reasons that the client itself gives: {own}.", 130)])


def methods() -> str:
    """The signatures of the client, without types, from the classes."""
    sys.path.insert(0, str(CHECKOUT))
    import saccade
    from saccade._core.requests import Sampling
    from saccade._sync.batches import BatchMethods
    from saccade._sync.media import MediaMethods

    def lines_of(owner: str, function: Any, *, result: bool = True) -> str:
        signature = inspect.signature(function)
        bare = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
        given = str(signature.replace(parameters=bare, return_annotation=signature.empty))
        text = f"{owner}{given}" + (f" -> {signature.return_annotation}" if result else "")
        return "\n".join(textwrap.wrap(text, 130, subsequent_indent="    ", break_on_hyphens=False))

    lines = ["```python", lines_of("saccade.Client", saccade.Client.__init__, result=False)]
    lines.append("saccade.AsyncClient(...)   # the same, for asyncio")
    lines += [lines_of("saccade.LocalClient", saccade.LocalClient.__init__, result=False), ""]
    for owner, kind in (
        ("client", saccade.Client), ("client.batches", BatchMethods), ("client.media", MediaMethods),
    ):  # fmt: skip
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                lines.append(lines_of(f"{owner}.{name}", function))
    further = ", ".join(f"`{name}`" for name in Sampling.__annotations__)
    return "\n".join([*lines, "```", "", *textwrap.wrap(f"`**sampling` is any of {further}.", 130)])


# -- options -----------------------------------------------------------------------------------------------------------


def options() -> str:
    """The table of all options of `saccade serve`."""
    sys.path.insert(0, str(CHECKOUT))
    from service.common.config import ServerOptions
    from service.common.settings import flag_of, value_words

    lines = ["| option | value | default | |", "| --- | --- | --- | --- |"]
    for spec in dataclasses.fields(ServerOptions):
        default = "off" if isinstance(spec.default, bool) else "" if spec.default in (None, ()) else spec.default
        name = "MODEL" if spec.name == "model" else flag_of(spec)
        lines.append(f"| `{name}` | {value_words(ServerOptions, spec)} | {default} | {spec.metadata['help']} |")
    return "\n".join(lines)


def main(folder: Path) -> None:
    parts = {
        "api.md": {
            "services": services, "reasons": reasons, "methods": methods, "client errors": client_errors,
            "reference": api,
        },
        "operations.md": {"options": options},
    }  # fmt: skip
    for file, bodies in parts.items():
        text = (DOCS / file).read_text("utf-8")
        for name, body in bodies.items():
            text = replace_between(text, name, body())
        (folder / file).write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
