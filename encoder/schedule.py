"""Which waiting images the encoder takes on next. Pure policy: numbers in, positions out, nothing kept.

Order. Each image has a moment at which it falls due:

    due = max(arrival, min(deadline, arrival + patience)) - priority * head_start

with priorities beyond 100 or -100 counted as these, as in the decoder's scheduler.
Earlier dues go first, and of equal ones the earlier arrival: first in, first out among equals, a deadline or a priority
moves an image ahead. A due never changes while an image waits, and no newcomer's due is before its own arrival less
its head start, so nothing that arrives after `due + newcomer's priority * head_start` is ever put before it.

Steps. The encoder has a budget of image tokens of its own for each step, apart from the decoder's. A step takes

    1. small images, of at most `share = step_tokens / 8` tokens, in order of due, until they come to `share` tokens;
    2. the most urgent image that is left, whatever its size;
    3. further ones in order of due, until the next would not fit.

Images of one request are images like any other: they may be taken in several steps, and nothing waits for its kin.

What follows, for an image that begins to wait before step 1:

    small:  taken no later than step  ceil(A / share),  A = tokens of small images due no later that waited meanwhile,
            its own included; whatever is large has no part in that, so large images never starve small ones.
    any:    taken no later than step  n,  n = images due no later that waited meanwhile, itself included;
            so small ones never starve large ones.
    a step: no more than  max(step_tokens, 2 * share + its largest image)  tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_LEVEL = 100
"""Priorities beyond this count as this: nobody goes first, or last, for ever."""
SMALL_SHARE = 8
"""Small images have an eighth of a step to themselves, and what fits that is small."""


@dataclass(frozen=True)
class SchedulePolicy:
    """What deadlines and priorities are worth, in seconds."""

    patience: float = 10.0
    """An image without a deadline is due this long after its arrival; a later deadline does not put it off further."""
    head_start: float = 1.0
    """What one step of priority is worth."""

    def __post_init__(self) -> None:
        if self.patience < 0 or self.head_start < 0:
            raise ValueError(f"patience {self.patience} and head_start {self.head_start} must not be negative")


@dataclass(frozen=True)
class Waiting:
    """An image, or a clip, that waits for the encoder. Times are of one clock, in seconds."""

    tokens: int
    arrival: float
    deadline: float | None = None
    priority: int = 0
    """Larger is more urgent."""


def due(item: Waiting, policy: SchedulePolicy) -> float:
    """The moment that orders the queue."""
    latest = item.arrival + policy.patience
    moment = latest if item.deadline is None else min(item.deadline, latest)
    level = max(-MAX_LEVEL, min(MAX_LEVEL, item.priority))
    return max(item.arrival, moment) - level * policy.head_start


def small_share(step_tokens: int) -> int:
    """Tokens that small images get in each step, and the most that a small image has."""
    if step_tokens < 1:
        raise ValueError(f"an encoder step needs at least one token, got {step_tokens}")
    return max(step_tokens // SMALL_SHARE, 1)


def choose(waiting: Sequence[Waiting], step_tokens: int, policy: SchedulePolicy | None = None) -> list[int]:
    """Positions of what the next step takes, most urgent first; never empty while anything waits.

    Raises `ValueError` for a step or an image without tokens.
    """
    policy = policy or SchedulePolicy()
    share = small_share(step_tokens)
    for position, item in enumerate(waiting):
        if item.tokens < 1:
            raise ValueError(f"image {position} has {item.tokens} tokens, it must have at least 1")
    order = sorted(range(len(waiting)), key=lambda index: (due(waiting[index], policy), waiting[index].arrival, index))
    taken: set[int] = set()
    total = 0
    for index in order:
        if total >= share:
            break
        if waiting[index].tokens <= share:
            taken.add(index)
            total += waiting[index].tokens
    rest = [index for index in order if index not in taken]
    for place, index in enumerate(rest):
        if place and total + waiting[index].tokens > step_tokens:
            break
        taken.add(index)
        total += waiting[index].tokens
    return [index for index in order if index in taken]
