"""Uploaded images and videos: a spool on disk, limited in bytes and time.

    DIRECTORY/<tenant>/<sha256>          a complete file, written once, renamed into place
    DIRECTORY/incoming/<random>          an upload in progress

Bytes are reserved before they arrive, so uploads that cannot be stored are rejected at their header. A file that has
not expired is never evicted: clients may rely on an id until its expiry. Files outlive a restart if the directory does;
their age is their modification time. All methods block and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from encoder.media_limits import ImageError, ImageHeader, ImageLimits
from service.common import errors
from service.media.arriving import ArrivingFile, disk_trouble

_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Media:
    """One file in the spool. `expires`: Unix time, seconds."""

    media_id: str
    size: int
    width: int
    height: int
    format: str
    expires: float


class Spool:
    """The uploaded files of all tenants."""

    def __init__(
        self, directory: Path, capacity: int, ttl: float, limits: ImageLimits, clock: Callable[[], float] = time.time,
        tenant_capacity: int | None = None, incoming: str = "incoming",
        describe: Callable[[bytes], ImageHeader] | None = None,
    ) -> None:  # fmt: skip
        """Loads the files that an earlier run has left in `directory`. Capacities in bytes, of all tenants together and
        of each; `ttl`: seconds. `describe`: reads the header of a file; None: in this process, which knows images
        only."""
        self.describe = describe or functools.partial(_header, limits=limits)
        self._tenant_capacity = capacity if tenant_capacity is None else tenant_capacity
        self._directory, self._capacity, self._ttl, self._limits, self._clock = directory, capacity, ttl, limits, clock
        self._lock = threading.Lock()
        self._media: dict[tuple[str, str], Media] = {}
        self._used = 0
        self._reserved: Counter[str] = Counter()
        self._incoming = directory / incoming
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in self._incoming.iterdir():
            part.unlink()
        self._adopt()

    @property
    def used_bytes(self) -> int:
        """Bytes of complete files and of running uploads."""
        with self._lock:
            return self._used + self._reserved.total()

    def _adopt(self) -> None:
        for path in self._directory.glob("*/*"):
            if not _ID.fullmatch(path.name) or not path.is_file():
                continue
            status = path.stat()
            try:
                header = self.describe(path.read_bytes())
            except ImageError:  # the limits have been lowered since
                path.unlink()
                continue
            media = Media(
                path.name, status.st_size, header.width, header.height, header.format, status.st_mtime + self._ttl
            )
            self._media[path.parent.name, path.name] = media
            self._used += media.size
        self.sweep()

    def sweep(self) -> int:
        """Deletes expired files; returns the bytes freed."""
        now = self._clock()
        with self._lock:
            expired = [key for key, media in self._media.items() if media.expires <= now]
            return sum(self._forget(key) for key in expired)

    def _forget(self, key: tuple[str, str]) -> int:
        media = self._media.pop(key)
        self._used -= media.size
        self._path(key).unlink(missing_ok=True)
        return media.size

    def _path(self, key: tuple[str, str]) -> Path:
        return self._directory / key[0] / key[1]

    @contextlib.contextmanager
    def upload(self, tenant: str, size: int) -> Iterator[Upload]:
        """Reserves `size` bytes for one file. An upload that is not committed is deleted. Raises InvalidArgument or
        ResourceExhausted."""
        if size < 1:
            raise errors.InvalidArgument(f"size_bytes is {size}; a file has at least 1 byte", field="header.size_bytes")
        if size > self._limits.max_bytes:
            raise errors.InvalidArgument(
                f"size_bytes is {size}; a file may have {self._limits.max_bytes}",
                field="header.size_bytes", reason="IMAGE_TOO_LARGE",
            )  # fmt: skip
        self.sweep()
        with self._lock:
            if (used := self._used + self._reserved.total()) + size > self._capacity:
                raise self._no_room(f"uploaded media fill {used} of {self._capacity} bytes, and this one has {size}")
            used = sum(m.size for (owner, _), m in self._media.items() if owner == tenant) + self._reserved[tenant]
            if used + size > self._tenant_capacity:
                raise self._no_room(
                    f"your uploads fill {used} of {self._tenant_capacity} bytes, and this one has {size}", tenant
                )
            self._reserved[tenant] += size
        path = self._incoming / secrets.token_hex(16)
        try:
            upload = Upload(self, path, tenant, size)
            try:
                yield upload
            finally:
                upload.close()
                path.unlink(missing_ok=True)
        finally:
            with self._lock:
                self._reserved[tenant] -= size

    def _no_room(self, message: str, tenant: str | None = None) -> errors.ResourceExhausted:
        """The error for a full spool, with the time until a file expires, if there is one."""
        times = [m.expires for (owner, _), m in self._media.items() if tenant in (None, owner)]
        return _full(message, max(0.001, min(times) - self._clock()) if times else None)

    def _keep(self, tenant: str, path: Path, media: Media) -> Media:
        key = (tenant, media.media_id)
        with self._lock, _disk():
            self._path(key).parent.mkdir(exist_ok=True, mode=0o700)
            os.replace(path, self._path(key))
            if key in self._media:
                self._used -= self._media[key].size
            self._media[key] = media = replace(media, expires=self._clock() + self._ttl)
            self._used += media.size
        return media

    def get(self, tenant: str, media_id: str) -> Media:
        """Raises NotFound."""
        with self._lock:
            media = self._media.get((tenant, media_id))
        if media is None or media.expires <= self._clock():
            raise _unknown(media_id)
        return media

    def renew(self, tenant: str, media_id: str) -> None:
        """Renews a file's expiry. Raises NotFound."""
        media = self.get(tenant, media_id)
        now = self._clock()
        with self._lock:
            if (tenant, media_id) in self._media:
                self._media[tenant, media_id] = replace(media, expires=now + self._ttl)
            with contextlib.suppress(FileNotFoundError):  # another process may have taken it, and may delete it
                os.utime(self._path((tenant, media_id)), (now, now))

    def size(self, tenant: str, media_id: str) -> int:
        """Size of a file in bytes. Raises NotFound."""
        return self.get(tenant, media_id).size

    def read(self, tenant: str, media_id: str) -> bytes:
        """The content of a file. Raises NotFound."""
        self.size(tenant, media_id)
        try:
            return self._path((tenant, media_id)).read_bytes()
        except FileNotFoundError:
            raise _unknown(media_id) from None

    def delete(self, tenant: str, media_id: str) -> None:
        """Deletes a file. Raises NotFound."""
        self.get(tenant, media_id)
        with self._lock:
            if (tenant, media_id) in self._media:
                self._forget((tenant, media_id))

    def check_integrity(self) -> None:
        """`AssertionError` unless the counts agree with the disk and, while no upload runs, no partial file is left."""
        with self._lock:
            assert self._used == sum(media.size for media in self._media.values())
            for key, media in self._media.items():
                assert self._path(key).stat().st_size == media.size, key
            if not self._reserved.total():
                assert not list(self._incoming.iterdir()), "parts of uploads that have ended"


class SharedSpool(Spool):
    """A spool that several frontend processes share: each counts the files that it has received, and all read the same
    folder. Each has its share of the limits. Files of other processes are found on disk; expired files of a process
    that has died are deleted by the first process that finds them."""

    def __init__(self, *arguments: Any, member: int, **keywords: Any) -> None:
        self._member = member
        keywords["incoming"] = f"incoming-{member}"
        super().__init__(*arguments, **keywords)

    def _adopt(self) -> None:
        if self._member == 0:
            super()._adopt()

    def get(self, tenant: str, media_id: str) -> Media:
        """Raises NotFound."""
        path = self._path((tenant, media_id))
        try:
            if not _ID.fullmatch(media_id):
                raise FileNotFoundError
            expires = path.stat().st_mtime + self._ttl
            with self._lock:
                known = self._media.get((tenant, media_id))
            if known is None and expires > self._clock():
                data = path.read_bytes()
                header = self.describe(data)
                return Media(media_id, len(data), header.width, header.height, header.format, expires)
        except (FileNotFoundError, ImageError):
            raise _unknown(media_id) from None
        return super().get(tenant, media_id)

    def size(self, tenant: str, media_id: str) -> int:
        """Size of a file in bytes; the content is not checked. Raises NotFound."""
        try:
            if not _ID.fullmatch(media_id):
                raise FileNotFoundError
            status = self._path((tenant, media_id)).stat()
        except FileNotFoundError:
            raise _unknown(media_id) from None
        if status.st_mtime + self._ttl <= self._clock():
            raise _unknown(media_id)
        return status.st_size

    def delete(self, tenant: str, media_id: str) -> None:
        """Raises NotFound."""
        self.get(tenant, media_id)
        with self._lock:
            if (tenant, media_id) in self._media:
                self._forget((tenant, media_id))
        self._path((tenant, media_id)).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Deletes expired files; returns the bytes freed."""
        with self._lock:
            for key, media in list(self._media.items()):
                with contextlib.suppress(FileNotFoundError):  # another process may have renewed it
                    expires = self._path(key).stat().st_mtime + self._ttl
                    self._media[key] = replace(media, expires=expires)
        freed = super().sweep()
        for path in self._directory.glob("*/*") if self._member == 0 else ():
            with contextlib.suppress(FileNotFoundError):
                if _ID.fullmatch(path.name) and path.stat().st_mtime + self._ttl <= self._clock():
                    freed += path.stat().st_size
                    path.unlink()
        return freed


class Upload:
    """One file that is being uploaded."""

    def __init__(self, spool: Spool, path: Path, tenant: str, size: int) -> None:
        self._spool, self._path, self._tenant = spool, path, tenant
        self._file = ArrivingFile(path, size, _disk)
        self.write, self.close = self._file.write, self._file.close

    def commit(self, expected_id: str = "") -> Media:
        """Commits the file. Raises InvalidArgument if it is too short, damaged or no image."""
        self._file.end()
        media_id = self._file.hash.hexdigest()
        if expected_id and expected_id != media_id:
            raise errors.InvalidArgument(
                f"the bytes that arrived have the id {media_id}", field="header.media_id", reason="MEDIA_DAMAGED"
            )
        try:
            header = self._spool.describe(self._path.read_bytes())
        except ImageError as error:
            raise errors.InvalidArgument(
                str(error), reason="IMAGE_TOO_LARGE" if error.too_large else "IMAGE_DECODE_FAILED", field="chunk"
            ) from error
        media = Media(media_id, self._file.size, header.width, header.height, header.format, 0.0)
        return self._spool._keep(self._tenant, self._path, media)


def tenant_folder(salt: bytes) -> str:
    return hashlib.sha256(salt).hexdigest()[:32] if salt else "anyone"


def _full(message: str, retry_after: float | None = None) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(message, reason="MEDIA_SPOOL_FULL", quota="media_bytes", retry_after=retry_after)


def _header(data: bytes, limits: ImageLimits) -> ImageHeader:
    from encoder.images import read_header  # imported here because it needs Pillow and numpy

    return read_header(data, limits)


_disk = functools.partial(disk_trouble, "the media spool", _full)


def _unknown(media_id: str) -> errors.NotFound:
    return errors.NotFound(
        f"no uploaded media {media_id!r}, or it has expired", field="media_id", reason="MEDIA_NOT_FOUND"
    )
