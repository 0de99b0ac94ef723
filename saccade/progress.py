"""Shows the progress of a batch on stderr: a bar if rich is installed, a rewritten line on a terminal, or a line every
few seconds in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


def duration(seconds: float) -> str:
    """`75.2` -> `1m15s`."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{whole % 60:02}s" if minutes else f"{whole}s"


class Progress:
    """Counts rows and tokens and shows them.

    Args:
        total: rows of the input.
        done: rows that an earlier run has answered; they do not count towards the rate.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        use_rich: bool = True,
    ) -> None:
        self.total, self.done, self.failed, self.tokens = total, done, 0, 0
        self._before = done
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._began = clock()
        self._shown = float("-inf")
        self._terminal = self._stream.isatty()
        self._interval = 0.2 if self._terminal else 5.0
        self._bar = _rich_bar(self._stream, total, done) if use_rich and self._terminal else None

    def add(self, tokens: int, failed: bool) -> None:
        """Counts a row; shows the state if enough time has passed since the last time."""
        self.done += 1
        self.failed += failed
        self.tokens += tokens
        if self._clock() - self._shown >= self._interval:
            self.show()

    def line(self) -> str:
        """`120/5000 rows, 3 failed, 812 tokens/s, 1m15s left`."""
        seconds = self._clock() - self._began
        parts = [f"{self.done}/{self.total} rows"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if seconds > 0 and self.done > self._before:
            parts.append(f"{self.tokens / seconds:.0f} tokens/s")
            left = (self.total - self.done) * seconds / (self.done - self._before)
            parts.append(f"{duration(left)} left" if self.done < self.total else f"in {duration(seconds)}")
        return ", ".join(parts)

    def show(self) -> None:
        """Writes the state. A full disk or a closed pipe of stderr does not end the job."""
        with suppress(OSError):
            self._show()

    def _show(self) -> None:
        self._shown = self._clock()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, description=self.line())
        elif self._terminal:
            print(f"\r\x1b[K{self.line()}", end="", file=self._stream, flush=True)
        else:
            print(self.line(), file=self._stream, flush=True)

    def close(self) -> None:
        """Shows the final state and ends the line."""
        self.show()
        with suppress(OSError):
            if self._bar is not None:
                self._bar.stop()
            elif self._terminal:
                print(file=self._stream, flush=True)


def _rich_bar(stream: TextIO, total: int, done: int) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
    except ImportError:
        return None
    bar = RichProgress(BarColumn(), TextColumn("{task.description}"), console=Console(file=stream))
    bar.add_task("", total=total, completed=done)
    bar.start()
    return bar
