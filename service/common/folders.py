"""Folders that belong to one process, which holds a lock on a file in each. The kernel releases the lock when the
process ends, even if it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from service.common.option import ConfigError

LOCK = ".owner"
"""The locked file of a temporary folder. A folder without this file is never deleted."""


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """Holds a lock on a file until `close`, or until nothing refers to this object."""

    def __init__(self, descriptor: int) -> None:
        self.close = weakref.finalize(self, os.close, descriptor)

    def __exit__(self, *_: object) -> None:
        self.close()


def locked(folder: Path, option: str) -> FolderLock:
    """Creates the folder that an option names and locks it for this process. `option`: its name, for errors. Raises
    ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{option}: {folder} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(f"{option}: another process uses {folder}") from None
    return FolderLock(lock)


def temporary() -> str:
    """The system's folder for temporary files. Raises ConfigError if there is none."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(f"TMPDIR: {error.strerror}; a folder that can be written to would work") from None


class OwnedFolder(tempfile.TemporaryDirectory[str]):
    """A new temporary folder. Deletes those with the same prefix whose processes were killed. Raises OSError, and
    ConfigError if there is no folder for it."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        """`parent`: None for the system's folder for temporary files."""
        parent = parent or temporary()
        _delete_abandoned(parent, prefix)
        super().__init__(prefix=prefix, dir=parent)
        new = Path(self.name) / f"{LOCK}.new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._unlock = weakref.finalize(self, os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(new, Path(self.name) / LOCK)  # only when it is locked, so that no process finds it unlocked

    def cleanup(self) -> None:
        super().cleanup()
        self._unlock()


def _delete_abandoned(parent: str, prefix: str) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            # Only folders of this user, even for root: every user may create folders there.
            mine = entry.name.startswith(prefix) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if mine and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # no lock, or one that is held
                    _delete_unlocked(Path(entry.path))


def _delete_unlocked(folder: Path) -> None:
    """Deletes the folder. Raises OSError if its owner is still running."""
    descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)
