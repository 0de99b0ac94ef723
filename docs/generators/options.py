"""The table of options, from service/common/config.py."""

from __future__ import annotations

import dataclasses


def options() -> str:
    """All options of `saccade serve`."""
    from service.common.config import ServerOptions
    from service.common.settings import flag_of, shown_default, value_words

    lines = ["| option | value | default | |", "| --- | --- | --- | --- |"]
    for spec in dataclasses.fields(ServerOptions):
        default = "off" if isinstance(spec.default, bool) else shown_default(spec)
        name = "MODEL" if spec.name == "model" else flag_of(spec)
        lines.append(f"| `{name}` | {value_words(ServerOptions, spec)} | {default} | {spec.metadata['help']} |")
    return "\n".join(lines)
