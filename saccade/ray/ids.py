"""Row ids as 64-bit integers, because Ray's checkpoints keep the ids of all finished rows in memory, sorted."""

from __future__ import annotations

import hashlib
from typing import Any

from saccade.errors import InvalidArgument

ID = "saccade_id"
"""The column of the output with the 64-bit ids of rows."""
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


def row_id(value: Any) -> int:
    """The 64-bit id: an integer itself; for a string or bytes, its BLAKE2b hash of 8 bytes.

    Raises:
        InvalidArgument: another type, null, or an integer of more than 64 bits.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not _SMALLEST <= value <= _LARGEST:
            raise InvalidArgument(f"id: expected an integer from -2^63 to 2^63 - 1, got {value}")
        return value
    if isinstance(value, str):
        value = value.encode()
    if not isinstance(value, bytes):
        raise InvalidArgument(f"id: expected an integer, a string or bytes, got {type(value).__name__}")
    return int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "little", signed=True)


def row_seed(base: int | None, identity: int) -> int:
    """A row's seed, derived from its id, so that a row that is answered again gets the same answer."""
    digest = hashlib.blake2b(f"{base or 0} {identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
