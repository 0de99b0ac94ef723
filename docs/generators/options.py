"""The tables of options, from service/common/config.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


def options() -> str:
    """All options of `saccade serve`."""
    from service.common.config import ServerOptions

    return _table(ServerOptions, dataclasses.fields(ServerOptions))


def http_options() -> str:
    """The options of `saccade http`, except those that `saccade serve` has too and passes on to it."""
    from service.common.config import HttpFrontOptions, HttpOptions

    shared = {spec.name for spec in dataclasses.fields(HttpOptions)}
    return _table(HttpFrontOptions, [spec for spec in dataclasses.fields(HttpFrontOptions) if spec.name not in shared])


def _table(kind: type, specs: Iterable[dataclasses.Field[Any]]) -> str:
    from service.common.settings import flag_of, shown_default, value_words

    lines = ["| option | value | default | |", "| --- | --- | --- | --- |"]
    for spec in specs:
        default = "off" if isinstance(spec.default, bool) else shown_default(spec)
        name = "MODEL" if spec.name == "model" else flag_of(spec)
        lines.append(f"| `{name}` | {value_words(kind, spec)} | {default} | {spec.metadata['help']} |")
    return "\n".join(lines)
