"""Chooses which waiting images the encoder runs next. Pure policy without state: numbers in, indices out.

Order. Each image has a due time:

    due = max(arrival, min(deadline, arrival + PATIENCE)) - priority * HEAD_START

with priorities clamped to -100..100, as in the decoder's scheduler. Images are ordered by due time, then by arrival:
first in, first out among equals, while a deadline or a priority moves an image ahead. A due time never changes while an
image waits, and a new image's due time is at least its arrival minus its head start, so no image that arrives after
`due + newcomer's priority * HEAD_START` can overtake.

Steps. The encoder has its own budget of image tokens per step, separate from the decoder's. A step takes

    1. small images, of at most `share = step_tokens / 8` tokens, in due order, up to `share` tokens in total;
    2. the most urgent remaining image, whatever its size;
    3. further images in due order, until the next one would not fit.

Images of one request are scheduled independently and may run in different steps.

Guarantees for an image that begins to wait before step 1:

    small:  runs no later than step  ceil(A / share),  A = tokens of small images due no later that waited meanwhile,
            its own included; large images do not count, so they never starve small ones.
    any:    runs no later than step  n,  n = images due no later that waited meanwhile, itself included;
            so small ones never starve large ones.
    a step: at most  max(step_tokens, 2 * share + its largest image)  tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE = 10.0
"""Seconds after its arrival at which an image is due at the latest, whatever its deadline."""
HEAD_START = 1.0
"""Seconds that one level of priority is worth."""
MAX_LEVEL = 100
"""Priorities are clamped to -100..100, so that no image is always first or always last."""
SMALL_SHARE = 8
"""One part in this many of each step is reserved for small images; an image of at most this size is small."""


@dataclass(frozen=True)
class Waiting:
    """An image or clip that waits for the encoder. Times are in seconds of one clock."""

    tokens: int
    arrival: float
    deadline: float | None = None
    priority: int = 0
    """Larger is more urgent."""


def due(item: Waiting) -> float:
    """The due time, which orders the queue."""
    latest = item.arrival + PATIENCE
    moment = latest if item.deadline is None else min(item.deadline, latest)
    level = max(-MAX_LEVEL, min(MAX_LEVEL, item.priority))
    return max(item.arrival, moment) - level * HEAD_START


def small_share(step_tokens: int) -> int:
    """Tokens reserved for small images in each step, which is also the size limit of a small image."""
    if step_tokens < 1:
        raise ValueError(f"an encoder step needs at least one token, got {step_tokens}")
    return max(step_tokens // SMALL_SHARE, 1)


def choose(waiting: Sequence[Waiting], step_tokens: int) -> list[int]:
    """Indices of the images of the next step, most urgent first; never empty while anything waits.

    Raises `ValueError` for a step or an image without tokens.
    """
    share = small_share(step_tokens)
    for position, item in enumerate(waiting):
        if item.tokens < 1:
            raise ValueError(f"image {position} has {item.tokens} tokens, it must have at least 1")
    order = sorted(range(len(waiting)), key=lambda index: (due(waiting[index]), waiting[index].arrival, index))
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
