"""A clock for code that takes one."""

from __future__ import annotations


class Clock:
    """Seconds that pass only when a test changes `now`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
