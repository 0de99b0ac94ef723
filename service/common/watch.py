"""Files that may be replaced while the server runs: certificates and keys."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from service.common.config import ConfigError
from service.common.small_files import read_small

log = logging.getLogger(__name__)
T = TypeVar("T")


class Watched(Generic[T]):
    """The parsed content of some files, parsed again when one of them has changed. Thread-safe.

    If a replacement cannot be read or parsed, an error is logged and the last valid value stays in use, so that an
    operator's mistake does not stop a running server. File contents are never logged.
    """

    def __init__(self, names: str, paths: Sequence[str | os.PathLike[str]], parse: Callable[[list[bytes]], T]) -> None:
        """Reads the files for the first time. Raises ConfigError. `names`: of the options that have the paths."""
        self._paths = [Path(p) for p in paths]
        self._parse = parse
        self._lock = threading.Lock()
        self._told = ""
        """The last error that was logged; empty while the files are usable."""
        try:
            self._stamp: list[tuple[int, int, int]] | None = self._stat()
            self._value = self._load()
        except OSError as error:
            raise ConfigError(f"{names}: cannot read {error.filename}: {error.strerror}") from None

    def _stat(self) -> list[tuple[int, int, int]]:
        return [(s.st_mtime_ns, s.st_size, s.st_ino) for s in (os.stat(path) for path in self._paths)]

    def _load(self) -> T:
        return self._parse([read_small(path) for path in self._paths])

    def current(self) -> T:
        """The value for the current files; takes one stat call per file."""
        with self._lock:
            try:
                stamp = self._stat()
                if stamp != self._stamp:
                    self._stamp = stamp  # updated first, so that bad content is parsed only once
                    self._value = self._load()
                    self._told = ""
                    log.info("%s: read again", ", ".join(map(str, self._paths)))
            except (OSError, ConfigError) as error:
                if isinstance(error, OSError):
                    self._stamp = None  # so that it is tried again: a corrected file mode does not change the stamp
                reason = str(error.strerror if isinstance(error, OSError) else error)
                if reason != self._told:
                    log.error(
                        "%s: not usable, the last valid version stays in use: %s",
                        ", ".join(map(str, self._paths)), reason,
                    )  # fmt: skip
                self._told = reason
            return self._value
