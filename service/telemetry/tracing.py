"""W3C trace context: read from a call's metadata, written into its log line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True)
class TraceContext:
    """The caller's place in a trace: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool


def from_metadata(metadata: Mapping[str, str | bytes]) -> TraceContext | None:
    """The context of a `traceparent` header; None without one, or for one that the standard says to ignore."""
    value = metadata.get("traceparent")
    match = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace, 16) or not int(span, 16):
        return None
    return TraceContext(trace, span, bool(int(flags, 16) & 1))
