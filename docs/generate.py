"""Writes the parts of the documentation that are made from the sources, between their markers:

api.md, grpc-reference.md   services, methods and messages, from the protos and their comments
http-reference.md           routes and bodies, from the OpenAPI document
sdk.md                      the client's methods and exceptions
options.md                  the options, from service/common/config.py
troubleshooting.md          the reasons of errors; causes and fixes are in generators/errors.toml

`python docs/generate.py [FOLDER]`: into FOLDER instead of this one. `make protos` runs it too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from generators import errors, grpc, http, options, sdk  # noqa: E402 - after the path is set

PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "api.md": {"services": grpc.services, "reasons": errors.reasons},
    "grpc-reference.md": {"reference": grpc.reference},
    "http-reference.md": {"reference": http.http_reference},
    "sdk.md": {"methods": sdk.methods, "exceptions": sdk.client_errors},
    "options.md": {"options": options.options},
    "troubleshooting.md": {"reasons": errors.troubleshooting},
}
"""By page: the name of each part, and the function that makes its Markdown."""


def replace_between(text: str, name: str, body: str) -> str:
    """`text` with `body` between the markers of `name`. ValueError where they are not."""
    begin, end = f"<!-- begin {name}: written by docs/generate.py -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the markers of {name!r} are missing")
    return f"{before}{begin}\n{body.strip()}\n\n{end}{after}"


def main(folder: Path) -> None:
    """Writes all pages with generated parts into `folder`."""
    for page, parts in PARTS.items():
        text = (DOCS / page).read_text("utf-8")
        for name, body in parts.items():
            text = replace_between(text, name, body())
        (folder / page).write_text(text, "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
