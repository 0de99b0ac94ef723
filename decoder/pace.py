"""The speed of recent steps, and whether a deadline can be met.

Every estimate is optimistic: it uses the best speed of recent steps, considers only the first tokens, and ignores the
tokens that other requests will still draw. So a request that is rejected could not have been answered in time.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

RECENT = 64
"""Number of recent steps that are considered."""


class DeadlineError(Exception):
    """A request cannot get its first tokens before its deadline; it is rejected before anything is computed for it."""


class Pace:
    """Tokens and seconds of recent steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def observe(self, tokens: int, seconds: float) -> None:
        """Records a step that has computed `tokens` tokens."""
        if tokens > 0 and seconds > 0:
            self._steps.append((tokens, seconds))

    def seconds(self, tokens: int, steps: int) -> float:
        """The shortest time for `tokens` tokens and then `steps` steps; 0 before any step.

        Tokens are computed at the best rate of a recent step, and each step takes at least as long as the shortest.
        """
        if not self._steps:
            return 0.0
        rate = max(count / seconds for count, seconds in self._steps)
        return tokens / rate + steps * min(seconds for _, seconds in self._steps)

    def tokens_in(self, timeout: float, min_tokens: int) -> float:
        """How many prompt tokens can be computed in time, before the fewest output tokens that a request needs; any
        number before any step."""
        if not self._steps:
            return math.inf if timeout >= 0 else -math.inf
        rate = max(count / seconds for count, seconds in self._steps)
        return (timeout - self.seconds(0, max(1, min_tokens) - 1)) * rate

    def check(self, timeout: float, tokens: int, min_tokens: int) -> None:
        """Raises `DeadlineError`, with the numbers, if `tokens` prompt tokens or more come before the request's own
        first tokens and cannot be computed in time."""
        if tokens > self.tokens_in(timeout, min_tokens):
            needed = self.seconds(tokens, max(1, min_tokens) - 1)
            raise DeadlineError(
                f"the deadline is {timeout:.3f} s away and the first tokens are at least {needed:.3f} s away: "
                f"at least {tokens} prompt tokens come before them"
            )


class StepTimer:
    """Measures steps with a clock."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.clock: Callable[[], float] = time.perf_counter
        """Returns seconds."""
        self._read = 0.0

    def read(self, tokens: int, started: float) -> None:
        """Records a step of `tokens` tokens that was launched at `started` and has been read now. If it was launched
        while another step ran, its time counts from when that one was read."""
        now = self.clock()
        seconds, self._read = now - max(started, self._read), now
        self.pace.observe(tokens, seconds)
