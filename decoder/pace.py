"""How fast steps have been of late, and what that says about a deadline.

Every answer errs on the side of hope: it takes the best pace of the last steps, asks for the first tokens alone, and
leaves out what others may still draw. A request that is refused by it could not have been served in time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

RECENT = 64
"""Steps that count."""


class DeadlineError(Exception):
    """A request that would not have its first tokens in time, refused before anything was computed for it."""


class Pace:
    """Tokens and seconds of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def observe(self, tokens: int, seconds: float) -> None:
        """One step that has computed `tokens` tokens."""
        if tokens > 0 and seconds > 0:
            self._steps.append((tokens, seconds))

    def seconds(self, tokens: int, steps: int) -> float:
        """The least that `tokens` tokens and then `steps` steps take; 0 as long as nothing has been seen.

        Tokens go at the best rate of one recent step, and each step lasts at least as long as the shortest.
        """
        if not self._steps:
            return 0.0
        rate = max(count / seconds for count, seconds in self._steps)
        return tokens / rate + steps * min(seconds for _, seconds in self._steps)

    def meets(self, timeout: float, tokens: int, min_tokens: int) -> bool:
        """Can `tokens` prompt tokens, and as many output tokens as a request cannot do without, take no longer?"""
        return self.seconds(tokens, max(1, min_tokens) - 1) <= timeout

    def check(self, timeout: float, tokens: int, min_tokens: int) -> None:
        """`DeadlineError` with both numbers where `meets` says no."""
        if not self.meets(timeout, tokens, min_tokens):
            needed = self.seconds(tokens, max(1, min_tokens) - 1)
            raise DeadlineError(
                f"the deadline is {timeout:.3f} s away and the first tokens are at least {needed:.3f} s away: "
                f"{tokens} prompt tokens come before them"
            )


class StepTimer:
    """Measures steps by a clock."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.clock: Callable[[], float] = time.perf_counter
        """Seconds."""
        self._read = 0.0

    def read(self, tokens: int, started: float) -> None:
        """A step of `tokens` tokens, begun at `started`, has been read. One that was launched while another ran took
        the time since that was read.
        """
        now = self.clock()
        seconds, self._read = now - max(started, self._read), now
        self.pace.observe(tokens, seconds)
