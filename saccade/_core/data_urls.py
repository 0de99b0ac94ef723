"""Data URLs, which contain a file (RFC 2397)."""

from __future__ import annotations

import base64
import urllib.parse


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def decode_data_url(url: str) -> bytes:
    """The bytes inside a data URL, in base64, which may be divided into lines, or percent-encoded. Raises
    `ValueError`."""
    header, comma, data = url.partition(",")
    if not comma:
        raise ValueError("a data URL needs a comma before its data")
    content = urllib.parse.unquote_to_bytes(data)
    if not header.rstrip(" ").lower().endswith(";base64"):
        return content
    try:
        # A space is an error, because it may be a plus sign that something has decoded.
        return base64.b64decode(content.translate(None, b"\r\n"), validate=True)
    except ValueError:
        raise ValueError("the data URL's base64 cannot be decoded") from None
