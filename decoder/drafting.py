"""Decides which tokens to draft, and how many. Pure policy: integers and measured seconds in, integers out.

A draft is a guess at what plain sampling will draw: these rules affect speed, never an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

LONGEST, SHORTEST = 4, 2
"""Lengths of the token runs that are looked up: a single token is too unspecific."""
LOOKED_AT = 64
"""Number of earlier occurrences of the last two tokens that are compared for the longest run."""

FORGET, FORGET_ALL = 0.95, 0.98
"""Decay per verified step of the acceptance statistics of a request, and of all requests."""
PRIOR_WEIGHT = 3.0
"""Weight, in drafts, of the acceptance of all requests in the estimate for one."""
FIRST_RATE = 0.6
"""Defaults until something has been measured: acceptance rate; and the additional time of a step with drafts in plain
steps, a fixed part and one per draft."""
FIRST_FIXED, FIRST_EACH = 0.1, 0.1
WORTH = 1.03
"""Smallest factor of tokens per second over plain decoding for which drafts are made: measurements are inexact."""

FIRST_GAP, LAST_GAP = 64, 512
"""Tokens between two probes of a request for which drafting is not worthwhile, while it is for others; doubled after
each failed probe."""
PROBE_DISTANCE = 32
"""Steps between the probes of two such requests, since a probe delays all requests."""
QUIET = {"unwanted": 16, "unfound": 16, "refused": 64, "unready": 256}
"""Steps without drafts, by reason, after which drafting pauses. `unwanted`: by the statistics of all requests, drafting
would not be worthwhile; `unfound`: there was nothing to propose; `refused`: the drafts of the running requests are
rejected, although those of others were accepted; `unready`: the drafter lacks state of the running requests.
"""
FIRST_PAUSE, LAST_PAUSE = 1024, 8192
"""Steps of a pause after drafts that were not worthwhile; each failed trial doubles them."""
DRY_PAUSE = 16
"""Steps of a pause after steps with nothing to propose."""
TRIALS = 6
"""Rows with one draft each in a trial, and then, if at least half of the drafts were accepted, as many rows with the
largest number of drafts."""

BASELINE_STEPS = 4
"""Steps without drafts that are measured for each number of rows before steps with drafts are."""
BASELINE_AGE = 512
"""Steps after which steps without drafts are measured again."""
PAUSE_SAMPLES = 16
"""One in this many steps of a pause is measured, since that costs no drafts."""


class NgramIndex:
    """Finds what followed the last tokens of a sequence at their latest earlier occurrence, in prompt and output."""

    def __init__(self, prompt: NgramIndex | None = None) -> None:
        """`prompt`: an index of the sequence's first tokens, which several samples may share and nobody extends."""
        self._prompt, self._first = prompt, 0 if prompt is None else len(prompt._before)
        self._last: dict[tuple[int, int], int] = {}
        """Two tokens -> the position after their last occurrence; without those of `prompt`."""
        self._before: list[int] = [0, 0] if prompt is None else []
        """By position, from `_first` on: position of the previous occurrence; 0 if there is none."""

    @classmethod
    def of(cls, prompt: Sequence[int]) -> NgramIndex:
        """The index of a prompt."""
        made = cls()
        made._extend(prompt)
        return made

    def _extend(self, tokens: Sequence[int]) -> None:
        last, before, known = self._last, self._before, {} if self._prompt is None else self._prompt._last
        for end in range(self._first + len(before), len(tokens)):
            pair = (tokens[end - 2], tokens[end - 1])
            before.append(last.get(pair) or known.get(pair, 0))
            last[pair] = end

    def _latest(self, pair: tuple[int, int]) -> int:
        """The position after the last occurrence of two tokens; 0 if there is none."""
        return self._last.get(pair) or (0 if self._prompt is None else self._prompt._latest(pair))

    def _previous(self, place: int) -> int:
        """The position of the occurrence before the one at `place`; 0 if there is none."""
        if self._prompt is not None and place < self._first:
            return self._prompt._before[place]
        return self._before[place - self._first]

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens; none if the last tokens have not occurred before. `tokens` must extend those of the
        previous call.

        The longest run is used, among equals the latest. A run that reaches the end of the sequence repeats itself: the
        proposal continues the repetition.
        """
        self._extend(tokens)
        if len(tokens) < SHORTEST or (place := self._latest((tokens[-2], tokens[-1]))) == 0:
            return []
        best, longest = place, 0
        for _ in range(LOOKED_AT):
            run = SHORTEST
            while run < LONGEST and run < place and tokens[place - run - 1] == tokens[-run - 1]:
                run += 1
            if run > longest:
                best, longest = place, run
            place = self._previous(place)
            if longest == LONGEST or place == 0:
                break
        known = len(tokens)
        found: list[int] = []
        for at in range(best, best + count):
            found.append(tokens[at] if at < known else found[at - known])
        return found


@dataclass
class Record:
    """Acceptance of one request's drafts."""

    hits: float = 0.0
    trials: float = 0.0
    """`hits`: accepted drafts; `trials`: drafts that were compared, up to the first rejected one of each step. Both are
    decayed sums."""
    gap: int = FIRST_GAP
    resume_at: int = 0
    """Length at which a request without drafts is probed again."""

    def add(self, seen: int, accepted: int, keep: float) -> None:
        self.hits, self.trials = self.hits * keep + accepted, self.trials * keep + seen


class StepTimes:
    """Measures how much longer steps with drafts take than steps of as many rows without."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._plain: dict[int, deque[float]] = {}
        self._measured: dict[int, int] = {}
        self._longer: dict[int, dict[float, deque[float]]] = {}
        """By number of rows (its bit length) and drafts per row: the additional time of a step, in plain steps."""
        self._extra: dict[int, list[float]] = {}

    def wants_plain(self, rows: int, step: int) -> bool:
        """Whether a step of this many rows without drafts should be measured."""
        plain = self._plain.get(rows)
        return plain is None or len(plain) < BASELINE_STEPS or step - self._measured[rows] > BASELINE_AGE

    def add(self, rows: int, drafted: int, seconds: float, step: int) -> None:
        """Records the time of a step of `rows` requests that all drew, with `drafted` drafts among them."""
        if drafted == 0:
            if rows not in self._plain or step - self._measured[rows] > BASELINE_AGE:
                self._plain[rows] = deque(maxlen=31)
            self._plain[rows].append(seconds)
            self._measured[rows] = step
        elif rows in self._plain:
            each = max(1, round(2 * drafted / rows)) / 2
            found = self._longer.setdefault(rows.bit_length(), {}).setdefault(each, deque(maxlen=15))
            found.append(max(0.0, seconds / self.plain(rows) - 1.0))
            self._extra.pop(rows.bit_length(), None)

    def plain(self, rows: int) -> float:
        """Seconds of a step without drafts: the median for this number of rows, or that of a larger number of rows if
        it is smaller, so that a few slow steps do not distort it."""
        return min(median(seconds) for count, seconds in self._plain.items() if count >= rows)

    def extra(self, rows: int) -> list[float]:
        """The additional time, in plain steps, of a step of `rows` rows with 1, 2, ... drafts each: a fixed part and a
        part per draft, from a line through the measurements. With a single measurement each part gets half."""
        size = rows.bit_length()
        if size not in self._extra:
            points = [(each, median(found)) for each, found in self._longer.get(size, {}).items()]
            fixed, slope = FIRST_FIXED, FIRST_EACH
            if len(points) == 1:
                ((each, longer),) = points
                fixed, slope = longer / 2, longer / 2 / each
            elif points:
                x, y = fmean(each for each, _ in points), fmean(longer for _, longer in points)
                spread = sum((each - x) ** 2 for each, _ in points)
                slope = max(0.0, sum((each - x) * (longer - y) for each, longer in points) / spread)
                fixed = y - slope * x
            self._extra[size] = [max(0.0, fixed + slope * drafts) for drafts in range(1, self.limit + 1)]
        return self._extra[size]


class DraftPolicy:
    """Decides how many drafts a request gets in the next step.

    A step with k drafts for each row gives 1 + rate + ... + rate ** k tokens per row and takes 1 + extra(k) plain
    steps: the k with the highest quotient is chosen, or 0 if no k gains enough (`WORTH`). If no request has got drafts
    for some steps, drafting pauses, and the drafter's state need not be kept up to date. A pause ends with a trial: a
    few rows get one draft, and if that goes well a few get as many as possible, so that rate and times are measured
    anew. A failed trial doubles the next pause.
    """

    def __init__(self, limit: int, *, adaptive: bool = True) -> None:
        self.limit, self.adaptive = limit, adaptive
        self.times = StepTimes(limit)
        self.all = Record()
        self.paused = False
        self._steps = 0
        self._resume_at = 0
        self._pause = FIRST_PAUSE
        self._tried = [0, 0]
        """Rows of the trial that were verified, with one draft and with more."""
        self._quiet = 0
        self._probe_at = 0

    # -- pauses and trials --------------------------------------------------------------------------------------------

    def awake(self) -> bool:
        """To be called once before each step: whether any request may get drafts in it."""
        self._steps += 1
        if self.paused and self._steps >= self._resume_at:
            self.paused = False
        return not self.paused

    @property
    def measuring(self) -> bool:
        """Whether the time of this step should be recorded."""
        return not self.paused or self._steps % PAUSE_SAMPLES == 0

    @property
    def on_trial(self) -> bool:
        """Whether a trial is running."""
        if not self.adaptive:
            return False
        one, more = self._tried
        return one < TRIALS or (more < TRIALS and self.limit > 1 and self.all.hits >= self.all.trials / 2)

    def drafts(self) -> None:
        """To be called for a step with drafts."""
        self._quiet = 0

    def idle(self, reason: str) -> None:
        """To be called for a step without drafts, with one of the reasons in `QUIET`."""
        self._quiet += 1
        if self._quiet < QUIET[reason] or not self.adaptive:
            return
        self.paused = True
        if reason == "unfound":  # one more trial, then the next pause
            self._resume_at, self._quiet = self._steps + DRY_PAUSE, QUIET[reason] - 1
            return
        self._resume_at, self._quiet = self._steps + self._pause, 0
        self._pause = min(LAST_PAUSE, self._pause * 2)
        self._tried, self.all = [0, 0], Record()

    # -- one step ------------------------------------------------------------------------------------------------------

    def rate(self, record: Record) -> float:
        """Probability that a draft is accepted, if those before it are."""
        whole = (self.all.hits + FIRST_RATE) / (self.all.trials + 1.0)
        return (record.hits + PRIOR_WEIGHT * whole) / (record.trials + PRIOR_WEIGHT)

    def measures(self, rows: int) -> bool:
        """Whether the next step of this many rows should have no drafts, as a measurement to compare with."""
        return self.adaptive and self.times.wants_plain(rows, self._steps)

    def best(self, record: Record, rows: int) -> int:
        """The number of drafts with the most tokens per second, if all rows were like this one."""
        rate, chosen, speed = self.rate(record), 0, WORTH
        chance = tokens = 1.0
        for drafts, extra in enumerate(self.times.extra(rows), 1):
            chance *= rate
            tokens += chance
            if tokens > speed * (1.0 + extra):
                chosen, speed = drafts, tokens / (1.0 + extra)
        return chosen

    def wanted(self, record: Record, length: int, rows: int) -> int:
        """Number of drafts for a request of `length` tokens in a step of `rows` requests."""
        if not self.adaptive:
            return self.limit
        if self.on_trial:
            return 1 if self._tried[0] < TRIALS else self.limit
        drafts = self.best(record, rows)
        if drafts:
            record.resume_at, self._pause = 0, FIRST_PAUSE
            return drafts
        if record.resume_at == 0:
            record.resume_at = length + record.gap
        if length < record.resume_at or self._steps < self._probe_at or self._quiet:
            return 0
        self._probe_at = self._steps + PROBE_DISTANCE
        return 1

    def learn(self, record: Record, length: int, drafted: int, accepted: int) -> None:
        """Records that `accepted` of `drafted` drafts were accepted; the request has `length` tokens now."""
        seen = min(drafted, accepted + 1)
        record.add(seen, accepted, FORGET)
        self.all.add(seen, accepted, FORGET_ALL)
        if self.on_trial:
            self._tried[drafted > 1] += 1
        elif record.resume_at:
            record.gap = FIRST_GAP if accepted else min(LAST_GAP, record.gap * 2)
            record.resume_at = length + record.gap if not accepted else 0

    def timed(self, rows: int, drafted: int, seconds: float) -> None:
        """Records the time of a step of `rows` requests that all drew, with `drafted` drafts among them."""
        self.times.add(rows, drafted, seconds, self._steps)
