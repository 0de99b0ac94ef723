"""Files that were uploaded over HTTP and wait to become batches: in a temporary folder, bounded, for some time."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import NotFound, RateLimited

LIFETIME = 24 * 3600.0
"""Seconds that a file is kept."""
MAX_FILES = 1000


@dataclass(frozen=True)
class StoredFile:
    """One file. It belongs to the API key that has uploaded it."""

    file_id: str
    owner: bytes
    name: str
    path: Path
    size: int
    created: int


class FileStore:
    """The files of all keys. Used on the event loop; writing is done by the caller."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._folder = tempfile.TemporaryDirectory(prefix="saccade-http-files-")
        self._files: dict[str, StoredFile] = {}

    def reserve(self, size: int) -> None:
        """Takes space for bytes that are about to be written. Raises RateLimited if there is none."""
        self.sweep()
        if self.used + size > self.capacity or len(self._files) >= MAX_FILES:
            raise RateLimited(
                f"uploaded files take {self.used} of {self.capacity} bytes, and {size} more are needed; files are "
                f"deleted {LIFETIME / 3600:g} hours after their upload, or before by their owners",
                reason="QUOTA_EXCEEDED",
            )
        self.used += size

    def new_path(self) -> Path:
        """Where the next file can be written."""
        return Path(self._folder.name) / secrets.token_hex(16)

    def add(self, path: Path, owner: bytes, name: str, size: int) -> StoredFile:
        """Adds a file whose bytes have been reserved."""
        stored = StoredFile(f"file-{path.name}", owner, name, path, size, int(time.time()))
        self._files[stored.file_id] = stored
        return stored

    def get(self, file_id: str, owner: bytes) -> StoredFile:
        """Raises NotFound, also for files of other keys."""
        stored = self._files.get(file_id)
        if stored is None or stored.owner != owner:
            raise NotFound(f"there is no file {file_id[:100]!r}", reason="FILE_NOT_FOUND")
        return stored

    def owned(self, owner: bytes) -> list[StoredFile]:
        """The newest first."""
        return [stored for stored in reversed(self._files.values()) if stored.owner == owner]

    def delete(self, stored: StoredFile) -> None:
        del self._files[stored.file_id]
        stored.path.unlink(missing_ok=True)
        self.used -= stored.size

    def sweep(self) -> None:
        """Deletes files whose time is over."""
        old = time.time() - LIFETIME
        for stored in [stored for stored in self._files.values() if stored.created < old]:
            self.delete(stored)

    def close(self) -> None:
        self._folder.cleanup()


def owner_of(headers: dict[str, str]) -> bytes:
    """Identifies the API key of a request without keeping it."""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
