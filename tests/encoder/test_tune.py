"""The tuned ladder is optimal, compared with every ladder; the waste of the usual ladders; a bounded histogram."""

from __future__ import annotations

import itertools
import math

import pytest
from counting import lines_run
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.budget import EncoderBudgets, token_ladder
from encoder.tune import (
    TokenHistogram,
    compare_ladders,
    geometric_ladder,
    ladder_work,
    packed_ladder,
    packed_work,
    real_tokens,
    tuned_ladder,
)

UNIFORM = dict.fromkeys(range(33, 8193), 1)


@pytest.mark.parametrize(
    ("ladder", "graphs", "waste"),
    [
        pytest.param(token_ladder(64, 8192), 8, 1.33, id="doublings"),
        pytest.param(geometric_ladder(64, 8192, math.sqrt(2)), 15, 1.17, id="sqrt2"),
        pytest.param(geometric_ladder(64, 8192, 2**0.25), 29, 1.09, id="fourth-root"),
        pytest.param(list(range(512, 8193, 512)), 16, 1.06, id="steps-of-512"),
    ],
)
def test_waste_on_uniform_sizes(ladder: list[int], graphs: int, waste: float) -> None:
    assert len(ladder) == graphs
    assert ladder_work(UNIFORM, ladder) / real_tokens(UNIFORM) == pytest.approx(waste, abs=0.006)


def test_tuned_beats_every_usual_ladder_of_its_length() -> None:
    for ladder in (token_ladder(64, 8192), geometric_ladder(64, 8192, math.sqrt(2)), list(range(512, 8193, 512))):
        tuned = tuned_ladder(UNIFORM, len(ladder))
        assert len(tuned) == len(ladder)
        assert ladder_work(UNIFORM, tuned) < ladder_work(UNIFORM, ladder)


def brute_force(histogram: dict[int, int], max_budgets: int) -> int:
    sizes = sorted(size for size, count in histogram.items() if count)
    return min(
        ladder_work(histogram, [*chosen, sizes[-1]])
        for length in range(max_budgets)
        for chosen in itertools.combinations(sizes[:-1], length)
    )


@settings(deadline=None, max_examples=300)
@given(
    histogram=st.dictionaries(st.integers(1, 300), st.integers(0, 40), min_size=1, max_size=9).filter(
        lambda counts: any(counts.values())
    ),
    max_budgets=st.integers(1, 10),
)
def test_tuned_is_optimal(histogram: dict[int, int], max_budgets: int) -> None:
    ladder = tuned_ladder(histogram, max_budgets)
    assert len(ladder) <= max_budgets
    assert ladder == sorted(set(ladder))
    assert ladder[-1] == max(size for size, count in histogram.items() if count)
    best = brute_force(histogram, max_budgets)
    assert ladder_work(histogram, ladder) == best
    shorter = len(ladder) - 1
    assert shorter == 0 or brute_force(histogram, shorter) > best, "a shorter ladder would do"


@settings(deadline=None, max_examples=100)
@given(
    histogram=st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=7),
    max_budgets=st.integers(1, 5),
    floor=st.integers(1, 30),
    above=st.integers(0, 20),
)
def test_floor_and_largest_are_kept(histogram: dict[int, int], max_budgets: int, floor: int, above: int) -> None:
    hi = max(*histogram, floor) + above
    ladder = tuned_ladder(histogram, max_budgets, floor=floor, hi=hi)
    assert ladder[-1] == hi and ladder[0] >= floor and len(ladder) <= max_budgets
    sizes = sorted({max(size, floor) for size in histogram} - {hi})
    candidates = (
        [*chosen, hi]
        for length in range(min(max_budgets, len(sizes) + 1))
        for chosen in itertools.combinations(sizes, length)
    )
    assert ladder_work(histogram, ladder) == min(ladder_work(histogram, ladder) for ladder in candidates)


def test_a_budget_for_each_size_wastes_nothing() -> None:
    histogram = {64: 5, 100: 1, 3328: 2}
    assert tuned_ladder(histogram, 3) == [64, 100, 3328]
    assert tuned_ladder(histogram, 99) == [64, 100, 3328]
    assert tuned_ladder({64: 5, 100: 0}, 9) == [64]


def test_tuning_takes_a_bounded_number_of_steps_for_each_size_and_budget() -> None:
    """`benchmarks.encoder --only packing` measures seconds."""
    for sizes, budgets in ((256, 4), (256, 16), (1024, 16)):
        histogram = {size: 1 + size * 7919 % 97 for size in range(1, sizes + 1)}
        assert lines_run(tuned_ladder, histogram, budgets) < 50 * sizes * budgets


def test_histogram_is_bounded_and_rounds_up() -> None:
    recorded = TokenHistogram(3328, bins=100)
    for tokens in range(1, 9000):
        recorded.add(tokens)
    counts = recorded.counts()
    assert len(counts) <= 100 and sum(counts.values()) == 8999
    assert list(counts) == sorted(counts) and max(counts) == 3328
    assert counts[34] == 34 and counts[3328] == 8999 - 97 * 34
    exact = TokenHistogram(100)
    for tokens in (7, 7, 100, 101):
        exact.add(tokens)
    assert exact.counts() == {7: 2, 100: 2}
    with pytest.raises(ValueError, match="0"):
        TokenHistogram(0)


def test_packing_wastes_less_than_replaying_alone() -> None:
    histogram = {70: 10, 130: 10, 300: 3}
    ladder = token_ladder(64, 1024)
    packed = packed_work(histogram, EncoderBudgets(tuple(ladder), 16))
    assert 1 <= packed < ladder_work(histogram, ladder) / real_tokens(histogram)
    assert packed == packed_work(histogram, EncoderBudgets(tuple(ladder), 16)), "the same draw each time"
    assert packed_work({2000: 1}, EncoderBudgets((64,), 1)) == 1, "eager work has no padding"


def test_reports_share_range_and_images() -> None:
    histogram = {80: 100, 300: 20, 1000: 1}
    doublings, steps, tuned, packed = compare_ladders(histogram, 3, lo=64, hi=1024, max_images=8)
    assert doublings.ladder == (64, 128, 256, 512, 1024)
    assert steps.ladder == (64, 91, 128, 182, 256, 363, 512, 725, 1024)
    assert tuned.ladder == (80, 300, 1024)
    assert tuned.alone < steps.alone < doublings.alone
    assert all(report.packed >= 1 for report in (doublings, steps, tuned, packed))
    assert packed.packed <= tuned.packed
    assert [report.ladder for report in compare_ladders({64: 1}, 4)] == [(64,)] * 4


@settings(deadline=None, max_examples=25)
@given(
    histogram=st.dictionaries(st.integers(1, 300), st.integers(1, 40), min_size=1, max_size=12),
    max_budgets=st.integers(1, 8),
    images=st.integers(1, 12),
)
def test_a_ladder_for_packed_batches_is_no_worse_than_the_others(
    histogram: dict[int, int], max_budgets: int, images: int
) -> None:
    hi = max(*histogram, images)
    ladder = packed_ladder(histogram, max_budgets, images=images, hi=hi)
    assert len(ladder) <= max_budgets and ladder[-1] == hi and ladder[0] >= images
    waste = packed_work(histogram, EncoderBudgets(tuple(ladder), images))
    others = [tuned_ladder(histogram, max_budgets, floor=images, hi=hi)]
    doublings = token_ladder(max(min(histogram), images), hi)
    others += [doublings] if len(doublings) <= max_budgets else []
    for other in others:
        assert waste <= packed_work(histogram, EncoderBudgets(tuple(other), images))


def test_tuning_for_packed_batches_pays() -> None:
    """Images of 200 to 3,320 tokens, sixteen waiting: launches are larger than images."""
    histogram = dict.fromkeys(range(200, 3329, 40), 1)
    alone = tuned_ladder(histogram, 5, floor=13, hi=3328)
    packed = packed_ladder(histogram, 5, images=13, hi=3328)
    waste = [packed_work(histogram, EncoderBudgets(tuple(ladder), 13)) for ladder in (packed, alone)]
    assert waste[0] + 0.01 < waste[1], waste


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        pytest.param(lambda: tuned_ladder({}, 3), "no image", id="empty"),
        pytest.param(lambda: tuned_ladder({5: 0}, 3), "no image", id="all-zero"),
        pytest.param(lambda: tuned_ladder({0: 1}, 3), "0 tokens", id="zero-size"),
        pytest.param(lambda: tuned_ladder({5: -1}, 3), "-1 images of 5", id="negative-count"),
        pytest.param(lambda: tuned_ladder({5: 1}, 0), "max_budgets 0", id="no-budgets"),
        pytest.param(lambda: tuned_ladder({5: 1}, 1, floor=0), "floor 0", id="zero-floor"),
        pytest.param(lambda: tuned_ladder({50: 1}, 1, hi=40), "50 .*40", id="above-hi"),
        pytest.param(lambda: compare_ladders({50: 1}, 1, hi=40), "50 .*40", id="report-above-hi"),
        pytest.param(lambda: compare_ladders({5: 1}, 1, lo=9, hi=8), "lo 9 .*8", id="lo-above-hi"),
        pytest.param(lambda: compare_ladders({5: 1}, 1, max_images=9), "9 .*5", id="images-above-hi"),
        pytest.param(lambda: geometric_ladder(5, 4, 2), "lo 5, hi 4", id="geometric-range"),
        pytest.param(lambda: geometric_ladder(5, 9, 1), "ratio 1", id="geometric-ratio"),
    ],
)
def test_misuse_names_the_numbers(call: object, numbers: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=numbers):
        call()
