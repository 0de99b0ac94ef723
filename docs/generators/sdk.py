"""Tables of the Python client, from its classes."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any


def client_errors() -> str:
    """A row for each class of saccade.errors, with the first line of its docstring."""
    from saccade import errors

    kinds = {n: k for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, errors.SaccadeError)}
    lines = ["| class | |", "| --- | --- |"]
    lines += [f"| `{name}` | {inspect.getdoc(kind).splitlines()[0]} |" for name, kind in kinds.items()]
    return "\n".join(lines)


def methods() -> str:
    """The signatures of the clients' methods, without the types of their parameters."""
    import saccade
    from saccade._core.requests import Sampling
    from saccade._sync.batches import BatchMethods
    from saccade._sync.media import MediaMethods

    def lines_of(owner: str, function: Any, *, result: bool = True) -> str:
        signature = inspect.signature(function)
        bare = [p.replace(annotation=p.empty) for p in list(signature.parameters.values())[1:]]
        given = str(signature.replace(parameters=bare, return_annotation=signature.empty))
        text = f"{owner}{given}" + (f" -> {signature.return_annotation}" if result else "")
        return "\n".join(textwrap.wrap(text, 118, subsequent_indent="    ", break_on_hyphens=False))

    lines = ["```text", lines_of("saccade.Client", saccade.Client.__init__, result=False)]
    lines.append("saccade.AsyncClient(...)   # the same methods, as coroutines")
    lines += [lines_of("saccade.LocalClient", saccade.LocalClient.__init__, result=False), ""]
    for owner, kind in (
        ("client", saccade.Client), ("client.batches", BatchMethods), ("client.media", MediaMethods),
    ):  # fmt: skip
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                lines.append(lines_of(f"{owner}.{name}", function))
    further = ", ".join(f"`{name}`" for name in Sampling.__annotations__)
    return "\n".join([*lines, "```", "", *textwrap.wrap(f"`**sampling` is any of {further}.", 118)])
