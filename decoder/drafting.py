"""Which tokens to draft, and how many. Pure policy: integers and measured seconds in, integers out.

A draft is only a guess at what plain sampling will draw: these rules decide about speed, never about an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ORDERS = (4, 3, 2)
"""Lengths of the runs of tokens that are looked up, longest first: a single token says too little."""

FORGET = 0.95
"""What a verified step leaves of what was known of a request's acceptance."""
PRIOR_WEIGHT = 3.0
"""Drafts that the acceptance of all requests counts for in the estimate of one."""
FIRST_RATE, FIRST_COST = 0.6, 0.15
"""Taken for granted until something has been measured."""
FIRST_PAUSE, LAST_PAUSE = 64, 512
"""Tokens between two probes of a request for which drafting loses; each failure doubles them."""
BASELINE_STEPS = 3
"""Steps without drafts that are measured for each number of rows before any with drafts are."""
BASELINE_AGE = 256
"""Steps after which they are measured again."""


class NgramIndex:
    """What followed the last tokens of one sequence the last time they came, in prompt and output."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 1

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens, none where the last ones are new. `tokens` begins with what it was before.

        A run that reaches into the present repeats itself: what it proposes is what it would go on with.
        """
        for end in range(self._indexed, len(tokens)):
            for order in ORDERS:
                if order <= end:
                    self._after[tuple(tokens[end - order : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        if tuple(tokens[-ORDERS[-1] :]) not in self._after:
            return []  # nor is any longer run known
        for order in ORDERS:
            place = self._after.get(tuple(tokens[-order:])) if order <= len(tokens) else None
            if place is not None:
                known = len(tokens)
                found: list[int] = []
                for at in range(place, place + count):
                    found.append(tokens[at] if at < known else found[at - known])
                return found
        return []


@dataclass
class Record:
    """How one request's drafts have fared."""

    hits: float = 0.0
    trials: float = 0.0
    """Drafts that were accepted, and those that were looked at: up to the first refused one of a step."""
    pause: int = FIRST_PAUSE
    resume_at: int = 0
    """Length at which a request without drafts is probed again."""


class DraftPolicy:
    """How many drafts a request gets in the next step.

    The rule. A step with drafts takes longer than one without, and everyone in it waits: measured, one draft costs
    `cost` tokens that plain steps would have drawn meanwhile. The j-th draft of a step gains a token if it and all
    before it are accepted, with probability rate ** j. So it is made while rate ** j > cost, and none is where rate <=
    cost: that request is probed with one draft after a pause that doubles at each failure.
    """

    def __init__(self, limit: int, *, adaptive: bool = True) -> None:
        self.limit, self.adaptive = limit, adaptive
        self.all = Record()
        self._plain: dict[int, deque[float]] = {}
        self._measured: dict[int, int] = {}
        self._costs: dict[int, deque[float]] = {}
        self._cost: dict[int, float] = {}
        self._steps = 0

    def rate(self, record: Record) -> float:
        """Probability that a draft is accepted, if those before it are."""
        whole = (self.all.hits + FIRST_RATE) / (self.all.trials + 1.0)
        return (record.hits + PRIOR_WEIGHT * whole) / (record.trials + PRIOR_WEIGHT)

    def cost(self, rows: int) -> float:
        """Plain tokens that one draft costs in a step of so many rows."""
        return self._cost.get(rows.bit_length(), FIRST_COST)

    def measures(self, rows: int) -> bool:
        """Is the next step of so many rows to be one without drafts, to measure others against?"""
        plain = self._plain.get(rows)
        return self.adaptive and (
            plain is None or len(plain) < BASELINE_STEPS or self._steps - self._measured[rows] > BASELINE_AGE
        )

    def wanted(self, record: Record, length: int, rows: int) -> int:
        """Drafts for a request of `length` tokens in a step of `rows` requests."""
        if not self.adaptive:
            return self.limit
        rate, cost = self.rate(record), self.cost(rows)
        drafts, chance = 0, rate
        while drafts < self.limit and chance > cost:
            drafts, chance = drafts + 1, chance * rate
        if drafts:
            return drafts
        if record.resume_at == 0:
            record.resume_at = length + record.pause
        return 1 if length >= record.resume_at else 0

    def learn(self, record: Record, length: int, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` drafts were what was drawn; the request has `length` tokens now."""
        seen = min(drafted, accepted + 1)
        for of, keep in ((record, FORGET), (self.all, 1.0 - (1.0 - FORGET) / 10)):
            of.hits, of.trials = of.hits * keep + accepted, of.trials * keep + seen
        if record.resume_at:
            record.pause = FIRST_PAUSE if accepted else min(LAST_PAUSE, record.pause * 2)
            record.resume_at = length + record.pause if not accepted else 0

    def timed(self, rows: int, drafted: int, seconds: float) -> None:
        """A step of `rows` requests that all drew, with `drafted` drafts among them, took so long."""
        self._steps += 1
        if drafted == 0:
            self._plain.setdefault(rows, deque(maxlen=9)).append(seconds)
            self._measured[rows] = self._steps
        elif rows in self._plain:
            costs = self._costs.setdefault(rows.bit_length(), deque(maxlen=31))
            costs.append((seconds / median(self._plain[rows]) - 1.0) * rows / drafted)
            self._cost[rows.bit_length()] = median(costs)
