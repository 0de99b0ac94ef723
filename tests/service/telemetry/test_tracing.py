"""The traceparent header, according to the W3C recommendation."""

from __future__ import annotations

import pytest

from service.telemetry.tracing import TraceContext, from_metadata

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", TraceContext(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-00", TraceContext(TRACE, SPAN, False)),
        (f"cc-{TRACE}-{SPAN}-01-future", TraceContext(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        ("", None),
    ],
)
def test_headers(header: str, expected: TraceContext | None) -> None:
    assert from_metadata({"traceparent": header}) == expected


def test_without_one() -> None:
    assert from_metadata({}) is None and from_metadata({"traceparent": b"x"}) is None
