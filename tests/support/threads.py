"""A process that cannot start as many threads as it wants to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def scarce_threads(monkeypatch: pytest.MonkeyPatch, name: str, failures: int) -> Iterator[None]:
    """The first `failures` starts of a thread of this name fail, as the system's limit makes them; there have been as
    many when the context ends."""
    plain, left = threading.Thread.start, [failures]

    def start(thread: threading.Thread) -> None:
        if thread.name == name and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        plain(thread)

    with monkeypatch.context() as scarce:
        scarce.setattr(threading.Thread, "start", start)
        yield
    assert not left[0]
