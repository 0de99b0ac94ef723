"""Row ids as 64-bit integers: Ray's checkpoints keep all ids of finished rows in memory, sorted."""

from __future__ import annotations

import hashlib
from typing import Any

from saccade.errors import InvalidArgument

ID = "saccade_id"
"""The output's column with the 64-bit id of a row."""
_SMALLEST, _LARGEST = -(2**63), 2**63 - 1


def row_id(value: Any) -> int:
    """An integer itself; for a string or bytes the first 8 bytes of its BLAKE2b hash.

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
    """A row's seed, so that a row that is answered again gets the same answer."""
    digest = hashlib.blake2b(f"{base or 0} {identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
