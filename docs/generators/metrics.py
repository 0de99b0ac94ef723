"""The tables of metrics, from service/telemetry/metric_names.py."""

from __future__ import annotations


def metrics() -> str:
    """A table for each part of the server."""
    from service.telemetry.metric_names import SECTIONS

    lines = []
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", "| metric | type | unit | labels | |", "| --- | --- | --- | --- | --- |"]
        for each in section:
            labels = ", ".join(f"`{label}`" for label in each.labels)
            lines.append(f"| `{each.exported}` | {each.kind} | {each.unit} | {labels} | {each.help} |")
        lines.append("")
    return "\n".join(lines)
