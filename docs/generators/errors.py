"""The tables of error reasons. The reasons are found in the sources of server and client; errors.toml has the texts."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

from . import CHECKOUT

# saccade/_core/resuming.py computes these reasons: each is the name of a setting in upper case.
_COMPUTED = {"FIRST_TOKEN_TIMEOUT", "IDLE_TIMEOUT"}


def reasons_raised(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """(class, reason, whether the error says how long to wait) of each call in `folder` whose `reason=` contains
    literals or constants of the module."""
    for path in sorted(folder.rglob("*.py")):
        yield from _raised_in(path)


@functools.cache
def _raised_in(path: Path) -> list[tuple[str, str, bool]]:
    text = path.read_text("utf-8")
    if "reason=" not in text:
        return []
    tree, found = ast.parse(text), []
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
                # f"{kind}_TOO_LARGE" stands for one reason of images and one of videos.
                kinds = ("IMAGE", "VIDEO") if value.startswith("_") else ("",)
                found += [(name, kind + value, "retry_after" in given) for kind in kinds]
    return found


def server_reasons(http: bool = True) -> set[tuple[str, str, bool]]:
    """(status code, reason, whether the error says how long to wait) of all errors of the server; with `http`, also of
    the HTTP server."""
    from service.common import errors

    kinds = {name: kind for name, kind in vars(errors).items() if getattr(kind, "code", None) and name != "StatusError"}
    found = {(kind.code.name, kind.reason, False) for kind in kinds.values()}
    found |= {(target.code.name, reason, False) for _, target, reason, _ in errors.FOREIGN}
    folders = [folder for folder in (CHECKOUT / "service").iterdir() if http or folder.name != "http"]
    raised = [each for folder in folders for each in reasons_raised(folder)]
    return found | {(kinds[name].code.name, reason, wait) for name, reason, wait in raised if name in kinds}


def all_reasons() -> set[str]:
    """Every reason in an error of the server, the HTTP server or the client."""
    raised = [*reasons_raised(CHECKOUT / "service"), *reasons_raised(CHECKOUT / "saccade")]
    return {reason for _, reason, _ in raised} | {reason for _, reason, _ in server_reasons()} | _COMPUTED


def troubleshooting() -> str:
    """A row for each reason: the client's exception, cause and fix. ValueError if errors.toml lacks a reason or has one
    that no error has."""
    from saccade.errors import StatusDetails, error_from_status

    told = tomllib.loads((Path(__file__).parent / "errors.toml").read_text("utf-8"))
    if missing := all_reasons() - told.keys():
        raise ValueError(f"docs/generators/errors.toml lacks {', '.join(sorted(missing))}")
    if stale := told.keys() - all_reasons():
        raise ValueError(f"docs/generators/errors.toml has reasons that no error has: {', '.join(sorted(stale))}")
    codes: dict[str, set[str]] = {}
    for code, reason, _ in server_reasons():
        codes.setdefault(reason, set()).add(code)
    for name, reason, _ in reasons_raised(CHECKOUT / "saccade"):
        codes.setdefault(reason, set()).add(name)
    lines = ["| reason | exception in Python | cause | what to do |", "| --- | --- | --- | --- |"]
    for reason, text in sorted(told.items()):
        kinds = {
            type(error_from_status(code, "", StatusDetails(reason=reason))).__name__ if code.isupper() else code
            for code in codes.get(reason, {"DEADLINE_EXCEEDED"} if reason in _COMPUTED else ())
        } - {"__init__"}
        shown = ", ".join(f"`{kind}`" for kind in sorted(kinds))
        lines.append(f'| <a id="{reason}"></a>`{reason}` | {shown} | {text["cause"]} | {text["fix"]} |')
    return "\n".join(lines)


def reasons() -> str:
    """The reasons over gRPC by status code; those whose errors say how long to wait have a column of their own."""
    found = server_reasons(http=False)
    waits = {(code, reason) for code, reason, wait in found if wait}
    lines = ["| code | reasons | with a time to wait (RetryInfo) |", "| --- | --- | --- |"]
    for code in sorted({code for code, _, _ in found}):
        told = [sorted({r for c, r, _ in found if c == code and ((c, r) in waits) == wait}) for wait in (False, True)]
        lines.append(f"| {code} | {', '.join(told[0])} | {', '.join(told[1])} |")
    return "\n".join(lines)
