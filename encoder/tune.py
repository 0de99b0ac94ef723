"""Finds the token budgets with the least padding for the image sizes that a server has seen.

Integers only. A histogram maps image tokens to counts. An image of t tokens that is replayed alone costs the smallest
budget that holds it, so the work of a ladder is the sum of those budgets, and its waste is that work divided by the
real tokens. Packed batches waste less; `packed_work` runs a sample of the histogram through the packer to measure how
much less.

`tuned_ladder` is exact. Some best ladder consists of seen sizes, since a budget between two of them can be lowered to
the smaller one. With the sizes v[1..n] ascending and N[j] images of at most v[j] tokens, the work of the best g budgets
whose largest is v[j] is

    f(g, j) = min over i < j of  f(g - 1, i) + v[j] * (N[j] - N[i])

which, for each g, is the lower envelope of the lines `f(g - 1, i) - N[i] * x` at x = v[j]. Slopes fall and queries
rise, so a pointer moves along the envelope, and each budget takes O(n).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from encoder.budget import EncoderBudgets, token_ladder
from encoder.packing import pack

Histogram = Mapping[int, int]
"""Image tokens -> images seen."""

SEARCH_STEPS = 6
"""Times that `packed_ladder` tunes for the launches of the previous ladder; it converges after two or three."""
WAITING = 16
"""Images that are assumed to wait at a time, except where a caller says otherwise."""
SAMPLE_IMAGES = 1024
"""Images that `packed_work` samples; its ratio then varies by about 1 % between samples."""


class TokenHistogram:
    """Counts of image tokens in a limited number of bins; an image counts as the upper end of its bin."""

    def __init__(self, largest: int, *, bins: int = 1024) -> None:
        """`largest`: upper end of the last bin, which also counts larger images."""
        if largest < 1 or bins < 1:
            raise ValueError(f"a histogram needs positive sizes, got largest {largest} and bins {bins}")
        self._largest = largest
        self._width = -(-largest // bins)
        self._counts: dict[int, int] = {}

    def add(self, tokens: int) -> None:
        key = min(-(-tokens // self._width) * self._width, self._largest)
        self._counts[key] = self._counts.get(key, 0) + 1

    def counts(self) -> dict[int, int]:
        """Image tokens -> images, ascending; a copy."""
        return dict(sorted(self._counts.items()))


def check_histogram(histogram: Histogram) -> None:
    """Raises `ValueError`, with the numbers, unless there is an image and every size and count is positive."""
    for tokens, count in histogram.items():
        if tokens < 1 or count < 0:
            raise ValueError(f"a histogram entry of {count} images of {tokens} tokens: sizes must be positive")
    if not any(histogram.values()):
        raise ValueError("the histogram holds no image")


def real_tokens(histogram: Histogram) -> int:
    """Tokens of all images, before any padding."""
    return sum(tokens * count for tokens, count in histogram.items())


def ladder_work(histogram: Histogram, ladder: Sequence[int]) -> int:
    """Tokens computed if each image is replayed alone; images larger than every budget run eagerly without padding."""
    steps = sorted(ladder)
    work = 0
    for tokens, count in histogram.items():
        position = bisect_left(steps, tokens)
        work += count * (steps[position] if position < len(steps) else tokens)
    return work


def packed_launches(histogram: Histogram, budgets: EncoderBudgets, *, batch: int) -> dict[int, int]:
    """Real tokens of a launch -> number of launches, if `batch` images wait at a time, for a sample of `SAMPLE_IMAGES`
    images, the same for each call."""
    check_histogram(histogram)
    sizes = sorted(histogram)
    drawn = random.Random(0).choices(sizes, [histogram[size] for size in sizes], k=SAMPLE_IMAGES)
    launches: dict[int, int] = {}
    for first in range(0, SAMPLE_IMAGES, batch):
        counts = drawn[first : first + batch]
        for packed in pack(counts, budgets):
            total = sum(counts[index] for index in packed.indices)
            launches[total] = launches.get(total, 0) + 1
    return launches


def packed_work(histogram: Histogram, budgets: EncoderBudgets) -> float:
    """Ratio of padded to real tokens if `WAITING` images wait at a time, on a fixed sample."""
    launches = packed_launches(histogram, budgets, batch=WAITING)
    return ladder_work(launches, budgets.token_budgets) / real_tokens(launches)


def geometric_ladder(lo: int, hi: int, ratio: float) -> list[int]:
    """`lo`, `lo * ratio`, ... rounded up, and `hi` itself. Raises `ValueError` unless `0 < lo <= hi` and `ratio >
    1`."""
    if not 0 < lo <= hi or ratio <= 1:
        raise ValueError(f"a ladder needs 0 < lo <= hi and a ratio above 1, got lo {lo}, hi {hi}, ratio {ratio}")
    ladder: list[int] = []
    power = 0
    while (step := math.ceil(lo * ratio**power - 1e-6)) < hi:  # sqrt(2) ** 2 must be 2 despite rounding
        if not ladder or step > ladder[-1]:
            ladder.append(step)
        power += 1
    return [*ladder, hi]


def tuned_ladder(histogram: Histogram, max_budgets: int, *, floor: int = 1, hi: int | None = None) -> list[int]:
    """The ladder of at most `max_budgets` budgets with the least `ladder_work`; among equals, the shortest.

    It covers every seen image. `floor`: the smallest budget allowed, such as the images of one batch. `hi`: a size that
    must be covered even if it was never seen, such as the largest legal image. Raises `ValueError` for an empty
    histogram, `max_budgets` or `floor` below 1, or an image above `hi`.
    """
    check_histogram(histogram)
    if max_budgets < 1 or floor < 1:
        raise ValueError(f"max_budgets {max_budgets} and floor {floor} must be at least 1")
    merged: dict[int, int] = {}
    for tokens, count in histogram.items():
        if count:
            merged[max(tokens, floor)] = merged.get(max(tokens, floor), 0) + count
    if hi is not None:
        if max(merged) > hi:
            raise ValueError(f"an image of {max(merged)} tokens is above hi {hi}")
        merged.setdefault(hi, 0)
    sizes = sorted(merged)
    below = [0, *accumulate(merged[size] for size in sizes)]
    return _best_ladder(sizes, below, max_budgets)


def packed_ladder(
    histogram: Histogram, max_budgets: int, *, images: int = 1, hi: int | None = None, batch: int = WAITING
) -> list[int]:
    """The ladder of at most `max_budgets` budgets with the least padding, as found by a search, if `batch` images wait
    at a time and at most `images` share a launch.

    The launches depend on the ladder, so the result is not proven optimal: the search starts from several ladders and
    repeatedly replaces each by the exact best ladder for its launches, until that changes nothing. On its sample the
    result is never worse than `tuned_ladder`, or than doublings that need no more budgets. `images`: the `floor` of
    `tuned_ladder`; `hi` and errors: see there.
    """
    best = tuned_ladder(histogram, max_budgets, floor=images, hi=hi)
    top = best[-1]
    start = max(min(size for size, count in histogram.items() if count), images)
    evenly = [max(top * step // max_budgets, images) for step in range(1, max_budgets + 1)]
    starts: list[list[int]] = [best, token_ladder(min(start, top), top), sorted(set(evenly))]
    waste: dict[tuple[int, ...], float] = {}
    for ladder in starts:
        for _ in range(SEARCH_STEPS):
            budgets = EncoderBudgets(tuple(ladder), images)
            if budgets.token_budgets in waste:
                break
            launches = packed_launches(histogram, budgets, batch=batch)
            waste[budgets.token_budgets] = ladder_work(launches, ladder) / real_tokens(launches)
            ladder = tuned_ladder(launches, max_budgets, floor=images, hi=top)
    _, _, least = min((work, len(tried), tried) for tried, work in waste.items() if len(tried) <= max_budgets)
    return list(least)


def _best_ladder(sizes: list[int], below: list[int], max_budgets: int) -> list[int]:
    """`sizes` ascending; `below[j]`: images among the first j sizes. The last size is always in the ladder."""
    count = len(sizes)
    best: list[int | None] = [0] + [None] * count  # f(0, .): without budgets only zero images are covered
    chosen: list[list[int]] = []
    costs: list[int] = []
    for _ in range(min(max_budgets, count)):
        best, picks = _one_more_budget(sizes, below, best)
        chosen.append(picks)
        final = best[count]
        assert final is not None, "the largest size can always be a budget"
        costs.append(final)
    used = costs.index(min(costs))  # the fewest budgets with the least work
    ladder, end = [], count
    for picks in reversed(chosen[: used + 1]):
        ladder.append(sizes[end - 1])
        end = picks[end]
    assert end == 0, end
    return ladder[::-1]


def _one_more_budget(
    sizes: list[int], below: list[int], before: list[int | None]
) -> tuple[list[int | None], list[int]]:
    """f(g, .) from f(g - 1, .), and for each j the i that gave the minimum."""
    after: list[int | None] = [None] * len(before)
    picks = [0] * len(before)
    hull: list[int] = []  # indices i whose line is on the envelope, by falling slope
    walk = 0

    def height(i: int, x: int) -> int:
        start = before[i]
        assert start is not None
        return start - below[i] * x

    for j in range(1, len(before)):
        i = j - 1
        if before[i] is not None:
            while len(hull) >= 2 and _is_covered(hull[-2], hull[-1], i, below, before):
                hull.pop()
            if hull and below[hull[-1]] == below[i] and height(hull[-1], 0) >= height(i, 0):
                hull.pop()  # parallel and not lower
            hull.append(i)
            walk = min(walk, len(hull) - 1)
        if not hull:
            continue
        x = sizes[j - 1]
        while walk + 1 < len(hull) and height(hull[walk + 1], x) < height(hull[walk], x):
            walk += 1
        after[j] = height(hull[walk], x) + x * below[j]
        picks[j] = hull[walk]
    return after, picks


def _is_covered(left: int, middle: int, right: int, below: list[int], start: list[int | None]) -> bool:
    """Whether line `middle` is nowhere the lowest: the outer two intersect no later than left and middle."""
    a, b, c = start[left], start[middle], start[right]
    assert a is not None and b is not None and c is not None
    return (c - a) * (below[middle] - below[left]) <= (b - a) * (below[right] - below[left])


@dataclass(frozen=True)
class LadderReport:
    """Evaluation of one ladder on a histogram."""

    name: str
    ladder: tuple[int, ...]
    alone: float
    """Ratio of padded to real tokens if each image is replayed alone."""
    packed: float
    """The same ratio with `WAITING` images waiting at a time."""


def compare_ladders(
    histogram: Histogram, max_budgets: int, *, lo: int | None = None, hi: int | None = None,
    max_images: int | None = None,
) -> list[LadderReport]:  # fmt: skip
    """Evaluates doublings, sqrt(2) steps and the tuned ladders on one histogram, with the same range and images per
    batch.

    `lo` and `hi`: the smallest and largest legal image; by default the smallest and largest that was seen.
    """
    check_histogram(histogram)
    seen = [tokens for tokens, count in histogram.items() if count]
    lo, hi = lo or min(seen), hi or max(seen)
    if max(seen) > hi or lo > hi:
        raise ValueError(f"images of up to {max(seen)} tokens and lo {lo} must not be above hi {hi}")
    images = max_images or min(hi // lo, lo)
    start = max(lo, images)
    if start > hi:
        raise ValueError(f"max_images {images} is above the {hi} tokens of the largest image")
    ladders = {
        "doublings": token_ladder(start, hi),
        "sqrt(2) steps": geometric_ladder(start, hi, math.sqrt(2)),
        "tuned, each alone": tuned_ladder(histogram, max_budgets, floor=images, hi=hi),
        "tuned, packed": packed_ladder(histogram, max_budgets, images=images, hi=hi),
    }
    real = real_tokens(histogram)
    reports = []
    for name, ladder in ladders.items():
        packed = packed_work(histogram, EncoderBudgets(tuple(ladder), images))
        reports.append(LadderReport(name, tuple(ladder), ladder_work(histogram, ladder) / real, packed))
    return reports
