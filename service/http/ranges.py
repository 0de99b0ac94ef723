"""Requests for a part of a file, as RFC 9110 describes them in section 14."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Mapping

from saccade.errors import InvalidArgument, OutOfRange

_RANGE = re.compile(r"bytes\s*=\s*([0-9]*)-([0-9]*)", re.IGNORECASE)


class Unsatisfiable(OutOfRange):
    """A range that has no byte of the file."""


def range_wanted(method: str, headers: Mapping[str, str], etag: str) -> str | None:
    """The header `range`; None if the whole file is to be sent: the header is missing, is about several ranges or other
    units than bytes, or belongs to another version of the file than that of `etag`, by the header `if-range`."""
    given = headers.get("range", "")
    unit = given.partition("=")[0].strip().lower()
    if method != "GET" or unit != "bytes" or "," in given or headers.get("if-range", etag) != etag:
        return None
    return given


def parse_range(given: str, size: int) -> range:
    """The positions of the bytes of a range in a file of `size` bytes. Raises InvalidArgument, and Unsatisfiable if
    there are none."""
    found = _RANGE.fullmatch(given.strip())
    first, last = found.groups() if found else ("", "")
    if not (first or last) or (first and last and _number(first) > _number(last)):
        raise InvalidArgument(f"range: expected bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT, got {given[:60]!r}")
    if first:
        wanted = range(_number(first), min(_number(last) + 1 if last else size, size))
    else:
        wanted = range(max(size - _number(last), 0), size)
    if not wanted:
        raise Unsatisfiable(f"range: {given[:60]!r} has none of the {size} bytes of the file", reason="OUT_OF_RANGE")
    return wanted


def _number(digits: str) -> int:
    """A number of any length. Of a longer one, the first 19 digits are more than a file has bytes, too."""
    return int(digits.lstrip("0")[:19] or 0)


async def cut(pieces: AsyncGenerator[bytes, None], skipped: int, count: int) -> AsyncGenerator[bytes, None]:
    """`count` bytes after the first `skipped` ones, after which `pieces` is closed."""
    async with contextlib.aclosing(pieces) as source:
        async for piece in source:
            kept = piece[skipped : skipped + count]
            skipped = max(0, skipped - len(piece))
            count -= len(kept)
            if kept:
                yield kept
            if not count:
                return
