"""A spool that several fronts have together: each keeps the books of what it has taken, all read the same folder."""

from __future__ import annotations

import contextlib
from typing import Any

from encoder.images import ImageError
from service.media.media import Media, Spool


class SharedSpool(Spool):
    """Bounds are each front's own part. What another front has taken is found on the disk, and what a front that died
    has taken is deleted by the first one when its time has come."""

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
            if not self.is_id(media_id):
                raise FileNotFoundError
            expires = path.stat().st_mtime + self._ttl
            with self._lock:
                known = self._media.get((tenant, media_id))
            if known is None and expires > self._clock():
                data = path.read_bytes()
                header = self.describe(data)
                return Media(media_id, len(data), header.width, header.height, header.format, expires)
        except (FileNotFoundError, ImageError):
            raise self.unknown(media_id) from None
        return super().get(tenant, media_id)

    def size(self, tenant: str, media_id: str) -> int:
        """Bytes of the file, which is not looked into. Raises NotFound."""
        try:
            if not self.is_id(media_id):
                raise FileNotFoundError
            status = self._path((tenant, media_id)).stat()
        except FileNotFoundError:
            raise self.unknown(media_id) from None
        if status.st_mtime + self._ttl <= self._clock():
            raise self.unknown(media_id)
        return status.st_size

    def delete(self, tenant: str, media_id: str) -> None:
        """Raises NotFound."""
        self.get(tenant, media_id)
        with self._lock:
            if (tenant, media_id) in self._media:
                self._forget((tenant, media_id))
        self._path((tenant, media_id)).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Deletes what has expired; returns the bytes freed."""
        with self._lock:
            for key, media in list(self._media.items()):
                with contextlib.suppress(FileNotFoundError):  # another front may have renewed it
                    expires = self._path(key).stat().st_mtime + self._ttl
                    self._media[key] = _until(media, expires)
        freed = super().sweep()
        for path in self._directory.glob("*/*") if self._member == 0 else ():
            with contextlib.suppress(FileNotFoundError):
                if self.is_id(path.name) and path.stat().st_mtime + self._ttl <= self._clock():
                    freed += path.stat().st_size
                    path.unlink()
        return freed


def _until(media: Media, expires: float) -> Media:
    return Media(media.media_id, media.size, media.width, media.height, media.format, expires)
