"""Writes the table of docs/licences.md: the packages that the server and its extras require, with their licences.

    .venv/bin/python -m release.licences

The licences are read from the metadata of the packages that are installed here. Versions are in each release's bill of
materials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "licences.md"
EXTRAS = ("", "gguf", "http", "otlp", "urls", "video")
"""The extras of saccade-server whose packages `make setup` installs; "" stands for no extra."""
OURS = ("saccade", "saccade-server")
CUDA = ("cuda-", "nvidia-", "triton")
"""Prefixes of the packages that torch's build with CUDA requires; the page mentions them below the table."""
SPDX = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "BSD 3-Clause": "BSD-3-Clause",
}
BEGIN, END = "<!-- begin packages: written by release/licences.py -->\n", "<!-- end packages -->"


def licence(of: Distribution) -> str:
    """The licence of a package, as an SPDX expression, from its metadata. ValueError if the metadata names none."""
    said = of.metadata
    if expression := said.get("License-Expression"):
        return str(expression)
    short = str(said.get("License") or "").strip()
    if re.fullmatch(r"[A-Za-z0-9.+ ()-]{1,60}", short):
        return SPDX.get(short, short)
    for classifier in said.get_all("Classifier") or []:
        if classifier.startswith("License :: OSI Approved :: "):
            return SPDX[classifier.rpartition(" :: ")[2]]
    raise ValueError(f"{said['Name']} {of.version}: its metadata names no licence")


def required(name: str, extra: str) -> Iterator[Requirement]:
    """The requirements of a package on this machine; with an extra, only those that the extra adds."""
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None and not extra:
            yield requirement
        elif marker and marker.evaluate({"extra": extra}) and not (extra and marker.evaluate({"extra": ""})):
            yield requirement


def installed() -> dict[str, tuple[str, str]]:
    """Name -> (licence, the package or extra that requires it), of all packages that are installed with the server,
    except those of CUDA. PackageNotFoundError for a package that is missing here."""
    found: dict[str, tuple[str, str]] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [("saccade-server", extra, "") for extra in EXTRAS]
    while waiting:
        name, extra, by = waiting.pop(0)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        if name not in found and name not in OURS:
            found[name] = licence(distribution(name)), by
        brings = f"{name}[{extra}]" if extra in EXTRAS[1:] and name in OURS else name
        for requirement in required(name, extra):
            other = canonicalize_name(requirement.name)
            if not other.startswith(CUDA):
                waiting += [(other, each, brings) for each in ("", *sorted(requirement.extras))]
    return found


def page(text: str) -> str:
    """`text` with the present table between its markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    rows = [f"| {name} | {spdx} | {by} |" for name, (spdx, by) in sorted(installed().items())]
    table = "\n".join(["| package | licence | brought by |", "| --- | --- | --- |", *rows])
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


if __name__ == "__main__":
    try:
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    except PackageNotFoundError as missing:
        raise SystemExit(f"{missing.name} is not installed: run `make setup`") from None
