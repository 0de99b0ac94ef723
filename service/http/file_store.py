"""Files that were uploaded over HTTP to become batches: in a folder, limited in size, number and time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import NotFound, RateLimited
from service.common.folders import OwnedFolder, locked

log = logging.getLogger(__name__)

LIFETIME = 24 * 3600.0
"""Seconds that a file is kept."""
MAX_FILES, MAX_KEY_FILES = 10_000, 1000
"""Limits on the files of all keys and of one, because each takes a little memory as long as it is stored."""
_OURS = re.compile(r"[0-9a-f]{32}(\.json|\.new)?")


@dataclass(frozen=True)
class StoredFile:
    """One file. It belongs to the API key that uploaded it."""

    owner: bytes
    name: str
    path: Path
    size: int
    created: float

    @property
    def file_id(self) -> str:
        return f"file-{self.path.name}"

    @property
    def expires(self) -> float:
        """When the file is deleted, as Unix time."""
        return self.created + LIFETIME

    def describe(self) -> None:
        """Writes the file's owner, name, size and time beside it, atomically. Without this description the file is
        deleted at the next restart."""
        about = {"owner": self.owner.hex(), "name": self.name, "size": self.size, "created": self.created}
        scratch = self.path.with_suffix(".new")
        with open(scratch, "w", encoding="utf-8") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self.path.with_suffix(".json"))

    def remove(self) -> None:
        for suffix in (".json", ".new", ""):
            self.path.with_suffix(suffix).unlink(missing_ok=True)


def stored_file(path: Path, owner: bytes, name: str, size: int) -> StoredFile:
    """Describes a file that is about to be written."""
    return StoredFile(owner, name, path, size, time.time())


class FileStore:
    """The files of all keys. Used on the event loop; writing is done by the caller.

    DIRECTORY/<random>         a file, as it was uploaded
    DIRECTORY/<random>.json    its owner, name, size and time, written after the file
    DIRECTORY/lock             locked by the process that uses the folder
    """

    def __init__(self, capacity: int, directory: str | None = None, *, key_capacity: int | None = None) -> None:
        """Loads the files that an earlier process has left in `directory`, and deletes incomplete ones. `capacity` and
        `key_capacity`: bytes of the files of all keys and of one; None: of one as of all. Raises ConfigError if another
        process uses the folder, or if it cannot be written."""
        self.capacity = capacity
        self.key_capacity = capacity if key_capacity is None else min(key_capacity, capacity)
        self._temporary = None
        if directory is None:
            self._temporary = OwnedFolder("saccade-http-files-")
            directory = self._temporary.name
        self._folder = Path(directory)
        self._lock = locked(self._folder, "http_file_dir")
        self._files = {stored.file_id: stored for stored in _found(self._folder)}
        self.used = 0
        self._used: Counter[bytes] = Counter()
        """Bytes of each key."""
        self._numbers = Counter(stored.owner for stored in self._files.values())
        """Files of each key."""
        for stored in self._files.values():
            self._count(stored.owner, stored.size)
        self.sweep()

    def _count(self, owner: bytes, size: int) -> None:
        self.used += size
        self._used[owner] += size
        if not self._used[owner]:
            del self._used[owner]

    def reserve(self, owner: bytes, size: int) -> None:
        """Reserves space for bytes that are about to be written for a key. Raises RateLimited if there is not enough
        for it or for all keys, or if there are too many files."""
        if self._shortage(owner, size):
            self.sweep()
            if shortage := self._shortage(owner, size):
                raise RateLimited(
                    f"{shortage}, and {size} more are needed; delete files, or wait until they are deleted "
                    f"{LIFETIME / 3600:g} hours after their upload",
                    reason="QUOTA_EXCEEDED",
                )
        self._count(owner, size)

    def _shortage(self, owner: bytes, size: int) -> str:
        """Which limit `size` more bytes of a key would exceed; empty if none."""
        for whose, count, most, used, capacity in (
            ("of this key", self._numbers[owner], MAX_KEY_FILES, self._used[owner], self.key_capacity),
            ("of all keys", len(self._files), MAX_FILES, self.used, self.capacity),
        ):
            if used + size > capacity or count >= most:
                return f"{count} uploaded files {whose} (at most {most}) take {used} of {capacity} bytes"
        return ""

    def release(self, owner: bytes, size: int) -> None:
        """Releases reserved bytes."""
        self._count(owner, -size)

    def new_path(self) -> Path:
        """An unused path for a new file."""
        return self._folder / secrets.token_hex(16)

    def add(self, stored: StoredFile) -> None:
        """Adds a file that has been written and whose bytes have been reserved."""
        self._files[stored.file_id] = stored
        self._numbers[stored.owner] += 1

    def get(self, file_id: str, owner: bytes) -> StoredFile:
        """The file with this id. Raises NotFound, also for files of other keys and expired ones."""
        self.sweep()
        stored = self._files.get(file_id)
        if stored is None or stored.owner != owner:
            raise NotFound(f"there is no file {file_id[:100]!r}", reason="FILE_NOT_FOUND")
        return stored

    def owned(self, owner: bytes) -> list[StoredFile]:
        """The files of a key, newest first."""
        self.sweep()
        return [stored for stored in reversed(self._files.values()) if stored.owner == owner]

    def delete(self, stored: StoredFile) -> None:
        del self._files[stored.file_id]
        self._numbers[stored.owner] -= 1
        if not self._numbers[stored.owner]:
            del self._numbers[stored.owner]
        stored.remove()
        self._count(stored.owner, -stored.size)

    def sweep(self) -> None:
        """Deletes expired files. One that cannot be deleted is logged, and deleted at the next start."""
        now = time.time()
        for stored in [stored for stored in self._files.values() if stored.expires < now]:
            try:
                self.delete(stored)
            except OSError as error:
                log.error("the expired file %s cannot be deleted: %s", stored.path, error.strerror)

    def close(self) -> None:
        self._lock.close()
        if self._temporary is not None:
            self._temporary.cleanup()


def _found(folder: Path) -> list[StoredFile]:
    """The files of a folder, oldest first. Incomplete files are deleted."""
    found, kept = [], {"lock"}
    for about in folder.glob("*.json"):
        if not _OURS.fullmatch(about.name):
            continue
        path = about.with_suffix("")
        try:
            told = json.loads(about.read_bytes())
            stored = StoredFile(bytes.fromhex(told["owner"]), str(told["name"]), path, told["size"], told["created"])
            if not isinstance(stored.created, float) or path.stat().st_size != stored.size:
                raise ValueError("its size differs from the recorded size")
        except (ValueError, KeyError, TypeError, OSError) as error:
            log.error("%s cannot be used and is deleted: %s", path, error)
            continue
        found.append(stored)
        kept |= {path.name, about.name}
    for path in folder.iterdir():
        if path.name not in kept and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda stored: stored.created)


def owner_of(headers: dict[str, str]) -> bytes:
    """A hash of the request's API key, which is in either of two headers; the key itself is not kept."""
    given = headers.get("authorization")
    key = headers.get("x-api-key", "") if given is None else given.partition(" ")[2].strip()
    key = f"Bearer {key}" if key else ""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
