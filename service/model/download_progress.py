"""Shows the progress of a download: a bar on a terminal, otherwise log lines."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0


class Stopped(Exception):
    """Another file has failed, or the user has interrupted the download. The received part of this file is kept for the
    next time."""


class Progress:
    """Bytes of all files together: a bar on a terminal, otherwise a log line every ten seconds."""

    def __init__(self, what: str, total: int) -> None:
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        # Without a terminal, and if HF_HUB_DISABLE_PROGRESS_BARS is set, this bar disables itself.
        self._bar = tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None)
        self._what, self._total, self._done = what, total, 0
        self._lock, self._said = threading.Lock(), time.monotonic()
        self.stopping = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, count: int) -> None:
        """`count` may be negative: a server without range support sends the whole file again."""
        if self.stopping:
            raise Stopped
        with self._lock:
            self._done += count
            self._bar.update(count)
            if self._bar.disable and time.monotonic() - self._said >= LOG_SECONDS:
                self._said = time.monotonic()
                log.info("fetching %s: %s of %s", self._what, size(self._done), size(self._total))


class NoBar:
    """For files too small for a bar: the part of tqdm's interface that `hf_hub_download` uses."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        pass

    def close(self) -> None:
        pass


def size(count: int) -> str:
    """Formats bytes in decimal units, as disks and the hub do: 3.5 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
