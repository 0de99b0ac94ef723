"""Uploaded images and videos: the spool, a folder that is limited in bytes and time.

    DIRECTORY/<tenant>/<sha256>          a complete file, written once, renamed into place
    DIRECTORY/incoming/<random>          an upload in progress

Bytes are reserved before they arrive, so an upload that cannot be stored is rejected when its header arrives. A file is
never evicted before it expires, so clients may rely on an id until then. Files survive a restart if the directory does;
a file's modification time is the time of its last upload. All methods block and may be called from any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import math
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

from encoder.media_limits import ImageError, ImageHeader
from service.common import errors
from service.media.arriving import ArrivingFile, disk_trouble

log = logging.getLogger(__name__)

_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Media:
    """One file in the spool. `size`: bytes. `width`, `height`: pixels, from the file's header. `format` is empty while
    the header has not been read. `expires`: Unix time in seconds."""

    media_id: str
    size: int
    width: int
    height: int
    format: str
    expires: float


class _Files(dict[tuple[str, str], Media]):
    """Complete files by tenant and id."""

    def __init__(self) -> None:
        super().__init__()
        self.used: Counter[str] = Counter()
        """Bytes of each tenant."""

    def put(self, key: tuple[str, str], media: Media) -> None:
        """Adds a file, or replaces its description."""
        if key in self:
            self.take(key)
        self[key] = media
        self.used[key[0]] += media.size

    def take(self, key: tuple[str, str]) -> Media:
        """Removes a file."""
        media = self.pop(key)
        self.used[key[0]] -= media.size
        return media


class Spool:
    """The uploaded files of all tenants."""

    _incoming_name = "incoming"

    def __init__(
        self, directory: Path, capacity: int, ttl: float, max_bytes: int, describe: Callable[[bytes], ImageHeader],
        clock: Callable[[], float] = time.time, tenant_capacity: int | None = None,
    ) -> None:  # fmt: skip
        """Loads the files that an earlier run has left in `directory`. `capacity`, `tenant_capacity`, `max_bytes`:
        bytes of all tenants together, of each tenant, and of a file. `ttl`: seconds that a file is kept after its last
        upload. `describe`: reads the header of a file; raises ImageError for a file that is not accepted."""
        self.describe = describe
        self._tenant_capacity = capacity if tenant_capacity is None else tenant_capacity
        self._directory, self._capacity, self._ttl, self._clock = directory, capacity, ttl, clock
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._media = _Files()
        self._reserved: Counter[str] = Counter()
        """Bytes of each tenant's running uploads."""
        self._incoming = directory / self._incoming_name
        self._incoming.mkdir(parents=True, exist_ok=True, mode=0o700)
        for part in self._incoming.iterdir():
            part.unlink()
        self._adopt()

    @property
    def used_bytes(self) -> int:
        """Bytes of complete files and of running uploads."""
        with self._lock:
            return self._usage().total()

    def _usage(self) -> Counter[str]:
        """Bytes that count towards the limits, by tenant. The caller must hold the lock."""
        return self._media.used + self._reserved

    def _first_expiry(self, tenant: str | None) -> float:
        """When the first complete file of a tenant, or of all, expires; infinite if there is none. The caller must hold
        the lock."""
        found = (media.expires for (owner, _), media in self._media.items() if tenant in (None, owner))
        return min(found, default=math.inf)

    def _exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps out other processes that use the folder. This spool has no others."""
        return contextlib.nullcontext()

    def _adopt(self) -> None:
        for path in self._directory.glob("*/*"):
            if not _ID.fullmatch(path.name) or not path.is_file():
                continue
            status = path.stat()
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != path.name:  # nobody can use it; any other fault may lie in this server or its limits
                log.warning("%s is deleted: its content, of SHA-256 %s, is not what was uploaded", path, digest)
                path.unlink()
                continue
            # The header is read when it is asked for, so that a server starts without waiting for image workers.
            media = Media(path.name, status.st_size, 0, 0, "", status.st_mtime + self._ttl)
            self._media.put((path.parent.name, path.name), media)
        self.sweep()

    def sweep(self) -> int:
        """Deletes expired files; returns the bytes freed."""
        now = self._clock()
        with self._lock:
            expired = [key for key, media in self._media.items() if media.expires <= now]
            return sum(self._forget(key) for key in expired)

    def _forget(self, key: tuple[str, str]) -> int:
        media = self._media.take(key)
        self._path(key).unlink(missing_ok=True)
        return media.size

    def _path(self, key: tuple[str, str]) -> Path:
        return self._directory / key[0] / key[1]

    @contextlib.contextmanager
    def upload(self, tenant: str, size: int) -> Iterator[Upload]:
        """Reserves `size` bytes for one file. An upload that is not committed is deleted. Raises InvalidArgument or
        ResourceExhausted."""
        if size < 1:
            raise errors.InvalidArgument(f"size_bytes is {size}; it must be at least 1", field="header.size_bytes")
        if size > self._max_bytes:
            raise errors.InvalidArgument(
                f"size_bytes is {size}; at most {self._max_bytes} are allowed",
                field="header.size_bytes", reason="IMAGE_TOO_LARGE",
            )  # fmt: skip
        path = self._incoming / f"{tenant}-{size}-{secrets.token_hex(16)}"

        def reserved() -> Upload:
            with self._exclusive(), self._lock:
                self._check_room(tenant, size)
                upload = Upload(self, path, tenant, size)
                self._reserved[tenant] += size
                return upload

        def release() -> None:
            with self._lock:
                self._reserved[tenant] -= size

        try:
            upload = reserved()
        except errors.ResourceExhausted:  # only then, since it looks at each file
            self.sweep()
            upload = reserved()
        with contextlib.ExitStack() as ends:
            ends.callback(release)
            ends.callback(path.unlink, missing_ok=True)
            ends.callback(upload.close)
            yield upload

    def _check_room(self, tenant: str, size: int) -> None:
        """Raises ResourceExhausted if `size` more bytes exceed a limit; its retry delay is the time until the first
        file expires, if there is one. The caller must hold the lock."""
        used = self._usage()
        for owner, held, capacity, whose in (
            (None, used.total(), self._capacity, "uploaded media"),
            (tenant, used[tenant], self._tenant_capacity, "your uploads"),
        ):
            if held + size > capacity:
                first = self._first_expiry(owner)
                raise _full(
                    f"{whose} fill {held} of {capacity} bytes, and this one has {size}",
                    None if first == math.inf else max(0.001, first - self._clock()),
                )

    def _keep(self, tenant: str, path: Path, media: Media) -> Media:
        key = (tenant, media.media_id)
        with _disk(), self._exclusive(), self._lock:
            self._path(key).parent.mkdir(exist_ok=True, mode=0o700)
            os.replace(path, self._path(key))
            media = replace(media, expires=self._clock() + self._ttl)
            self._media.put(key, media)
        return media

    def get(self, tenant: str, media_id: str) -> Media:
        """The description of a file. Raises NotFound, or InvalidArgument if the server does not accept a file of an
        earlier run, such as one above a limit that has been lowered since."""
        media = self._find(tenant, media_id)
        if media.format:
            return media
        header = _checked_header(self.describe, self.read(tenant, media_id), "media_id")
        found: dict[str, Any] = {"width": header.width, "height": header.height, "format": header.format}
        with self._lock:
            if (known := self._media.get((tenant, media_id))) is not None:
                self._media[tenant, media_id] = replace(known, **found)
        return replace(media, **found)

    def _find(self, tenant: str, media_id: str) -> Media:
        """The description as far as it is known. Raises NotFound."""
        with self._lock:
            media = self._media.get((tenant, media_id))
        if media is None or media.expires <= self._clock():
            raise _unknown(media_id)
        return media

    def renew(self, tenant: str, media_id: str) -> None:
        """Renews a file's expiry. Raises NotFound."""
        self._find(tenant, media_id)
        now = self._clock()
        with self._lock:
            if (media := self._media.get((tenant, media_id))) is not None:
                self._media.put((tenant, media_id), replace(media, expires=now + self._ttl))
            with contextlib.suppress(FileNotFoundError):  # another process may have received it, and may delete it
                os.utime(self._path((tenant, media_id)), (now, now))

    def size(self, tenant: str, media_id: str) -> int:
        """Size of a file in bytes. Raises NotFound."""
        return self._find(tenant, media_id).size

    def read(self, tenant: str, media_id: str) -> bytes:
        """The content of a file. Raises NotFound."""
        self.size(tenant, media_id)
        try:
            return self._path((tenant, media_id)).read_bytes()
        except FileNotFoundError:
            raise _unknown(media_id) from None

    def delete(self, tenant: str, media_id: str) -> None:
        """Deletes a file. Raises NotFound."""
        self._find(tenant, media_id)
        with self._lock:
            if (tenant, media_id) in self._media:
                self._forget((tenant, media_id))

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the counts agree with the disk and, while no upload runs, no partial file is
        left."""
        with self._lock:
            for key, media in self._media.items():
                assert self._path(key).stat().st_size == media.size, key
            assert self._media.used.total() == sum(media.size for media in self._media.values())
            if not self._reserved.total():
                assert not list(self._incoming.iterdir()), "files of uploads that have ended"


class SharedSpool(Spool):
    """A spool that several frontend processes share. The limits apply to all of them together and are computed from the
    folder, so that they hold regardless of which process receives a file, and after a process was replaced. The name of
    a running upload contains its tenant and its size."""

    def __init__(self, *arguments: Any, member: int, members: int, **keywords: Any) -> None:
        """`member`: the number of this process, from 0 to `members` - 1."""
        self._member, self._members = member, members
        self._incoming_name = f"incoming-{member}"
        super().__init__(*arguments, **keywords)

    def _adopt(self) -> None:
        if self._member == 0:
            super()._adopt()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keeps out other processes while an upload begins or is committed, and while expired files are deleted."""
        with (self._directory / "uploads.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _usage(self) -> Counter[str]:
        """Bytes that count towards the limits, by tenant, of all processes."""
        used: Counter[str] = Counter()
        for member in range(self._members):  # first, so that an upload that is committed meanwhile is not missed
            for path in self._directory.glob(f"incoming-{member}/*-*-*"):
                tenant, reserved, _ = path.name.rsplit("-", 2)
                used[tenant] += int(reserved)
        for tenant, _, size, _ in self._files():
            used[tenant] += size
        return used

    def _first_expiry(self, tenant: str | None) -> float:
        """When the first complete file of a tenant, or of all, expires; infinite if there is none."""
        found = (expires for owner, _, _, expires in self._files() if tenant in (None, owner))
        return min(found, default=math.inf)

    def _files(self) -> Iterator[tuple[str, str, int, float]]:
        """Tenant, id, bytes and expiry of the complete files of all processes."""
        for folder in self._directory.iterdir():
            if not folder.is_dir():
                continue
            try:
                entries = list(os.scandir(folder))  # a third of the time that `Path` takes
            except (FileNotFoundError, PermissionError):  # such as lost+found of a volume
                continue
            for entry in entries:
                if _ID.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        yield folder.name, entry.name, status.st_size, status.st_mtime + self._ttl

    def _find(self, tenant: str, media_id: str) -> Media:
        """The description as far as it is known. Raises NotFound."""
        try:
            if not _ID.fullmatch(media_id):
                raise FileNotFoundError
            status = self._path((tenant, media_id)).stat()
        except FileNotFoundError:
            raise _unknown(media_id) from None
        expires = status.st_mtime + self._ttl
        if expires <= self._clock():
            raise _unknown(media_id)
        with self._lock:
            known = self._media.get((tenant, media_id))
        if known is not None:  # another process may have renewed its expiry
            return replace(known, expires=expires)
        return Media(media_id, status.st_size, 0, 0, "", expires)

    def delete(self, tenant: str, media_id: str) -> None:
        """Deletes a file. Raises NotFound."""
        super().delete(tenant, media_id)
        self._path((tenant, media_id)).unlink(missing_ok=True)  # another process may have received it

    def sweep(self) -> int:
        """Deletes expired files of all processes; returns the bytes freed."""
        now, freed = self._clock(), 0
        with self._exclusive(), self._lock:
            for tenant, media_id, size, expires in list(self._files()):
                if expires <= now:
                    self._path((tenant, media_id)).unlink(missing_ok=True)
                    freed += size
            for key in [key for key in self._media if not self._path(key).exists()]:
                self._media.take(key)
        return freed


class Upload:
    """One file that is being uploaded."""

    def __init__(self, spool: Spool, path: Path, tenant: str, size: int) -> None:
        self._spool, self._path, self._tenant = spool, path, tenant
        self._file = ArrivingFile(path, size, _disk)
        self.write, self.close = self._file.write, self._file.close

    def commit(self, expected_id: str = "") -> Media:
        """Completes the upload. Raises InvalidArgument if the file is too short, has another id than expected, or is
        not an image or video that the server accepts."""
        self._file.end()
        media_id = self._file.hash.hexdigest()
        if expected_id and expected_id != media_id:
            raise errors.InvalidArgument(
                f"the bytes that arrived have the id {media_id}, not {expected_id[:64]!r}",
                field="header.media_id",
                reason="MEDIA_DAMAGED",
            )
        header = _checked_header(self._spool.describe, self._path.read_bytes(), "chunk")
        media = Media(media_id, self._file.size, header.width, header.height, header.format, 0.0)
        return self._spool._keep(self._tenant, self._path, media)


def _checked_header(describe: Callable[[bytes], ImageHeader], data: bytes, field: str) -> ImageHeader:
    """Raises InvalidArgument, for `field`, if `data` is not an image or video that the server accepts."""
    try:
        return describe(data)
    except ImageError as error:
        raise errors.InvalidArgument(
            str(error), reason="IMAGE_TOO_LARGE" if error.too_large else "IMAGE_DECODE_FAILED", field=field
        ) from error


def tenant_folder(salt: bytes) -> str:
    """The name of a tenant's folder."""
    return hashlib.sha256(salt).hexdigest()[:32] if salt else "anyone"


def _full(message: str, retry_after: float | None = None) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(message, reason="MEDIA_SPOOL_FULL", quota="media_bytes", retry_after=retry_after)


_disk = functools.partial(disk_trouble, "the media spool", _full)


def _unknown(media_id: str) -> errors.NotFound:
    return errors.NotFound(
        f"no uploaded media {media_id!r}, or it has expired", field="media_id", reason="MEDIA_NOT_FOUND"
    )
