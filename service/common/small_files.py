"""Files that an operator names: options, keys, certificates."""

from __future__ import annotations

import errno
import os

LARGEST = 16 * 2**20
"""Bytes; API keys of tens of thousands of clients have less."""


def read_small(path: str | os.PathLike[str]) -> bytes:
    """The content of a file or a pipe. Raises OSError, also for more than `LARGEST` bytes: /dev/zero has no end."""
    content = bytearray()
    with open(path, "rb") as file:
        while chunk := file.read(2**16):
            content += chunk
            if len(content) > LARGEST:
                raise OSError(errno.EFBIG, f"it has more than {LARGEST} bytes", os.fspath(path))
    return bytes(content)
