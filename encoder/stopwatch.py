"""Times the stages of preparing an image."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stopwatch:
    """Seconds spent in each stage of making patches."""

    seconds: Counter[str] = field(default_factory=Counter)
    frames: int = 0
    """Number of a clip's frames."""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start  # type: ignore[assignment]
