"""Compares answers under many combinations of options with plain answers, for the soaks `product` and `constrained`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.soak import Outcome

SUPPORT = str(Path(__file__).resolve().parents[1] / "tests" / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

if TYPE_CHECKING:
    from speculation import Answers

RARE = 0.01
TOLERANCE = 1e-4
"""Maximum difference of log-probabilities (natural logarithm)."""
COUNTED = {"verified_steps": "drafted_1", "forced_drafts": "forced_drafted", "preemptions": "preemptions"}
"""Name in the result -> the runner's counter. These counts show that the options took effect."""


@dataclass
class Comparison:
    """The results of all combinations so far.

    A different token is accepted if the decision margin was less than ten times the difference of the two paths'
    logits. Such cases are listed; more than one request in a hundred is a failure.
    """

    total: int
    """Number of combinations, for progress lines."""
    failed: list[dict[str, Any]] = field(default_factory=list)
    excuses: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    requests: int = 0
    tokens: int = 0
    replays: int = 0
    worst: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    def check(
        self, case: dict[str, Any], expected: Answers, plain: Callable[[], Answers], other: Callable[[], Answers]
    ) -> None:
        """Runs `other`, and `plain` again if their tokens differ. `case`: how a failure is listed; `expected`: the
        answers of `plain`."""
        try:
            found = other()
            wrong = [name for name, drawn in expected.drawn.items() if found.drawn.get(name) != drawn]
            wrong = [name for name in wrong if not self._excused(case, name, expected, found, plain, other)]
        except Exception as error:  # a combination that cannot run has failed, and the others still run
            self.failed.append({**case, "error": repr(error)})
        else:
            self._count(case, wrong, expected, found)
        self.done += 1
        if self.done % 100 == 0:
            print(f"  {self.done} of {self.total}, {len(self.failed)} failed", file=sys.stderr, flush=True)

    def _excused(
        self, case: dict[str, Any], name: str, expected: Answers, found: Answers, plain: Callable[[], Answers],
        other: Callable[[], Answers],
    ) -> bool:  # fmt: skip
        from margins import excused

        mine, theirs = expected.drawn[name][0], found.drawn.get(name, ([], None))[0]
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if at is None:
            return False
        ok, difference = excused(name, mine[:at], theirs[at], plain, other)
        if ok:
            self.excuses.append({**case, "request": name, "token": at, "logit_difference": difference})
        return ok

    def _count(self, case: dict[str, Any], wrong: list[str], expected: Answers, found: Answers) -> None:
        gaps = [
            abs(one - other)
            for name, of in expected.logprobs.items()
            if found.drawn.get(name) == expected.drawn[name]
            for one, other in zip(of, found.logprobs[name], strict=True)
        ]
        largest = max(gaps, default=0.0)
        self.worst = max(self.worst, largest)
        if wrong or largest > TOLERANCE:
            self.failed.append({**case, "requests": wrong, "logprobs": largest})
        self.requests += len(expected.drawn)
        self.tokens += sum(len(drawn) for drawn, _ in found.drawn.values())
        self.replays += sum(count for name, count in found.stats.items() if name.startswith("replays_"))
        for name, counter in COUNTED.items():
            self.counts[name] += found.stats.get(counter, 0)

    def outcome(self, **described: Any) -> Outcome:
        """Whether all combinations passed. The numbers begin with `described`."""
        return Outcome(
            not self.failed and len(self.excuses) <= RARE * self.requests,
            {
                **described,
                "combinations": self.done,
                "failed": self.failed,
                "requests": self.requests,
                "excused": self.excuses,
                "tokens": self.tokens,
                **self.counts,
                "replays": self.replays,
                "largest_logprob_difference": self.worst,
            },
        )
