"""What is drafted and how much: looked-up runs, and the rule of cost against acceptance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.drafting import (
    BASELINE_STEPS,
    DRY_REST,
    FIRST_PAUSE,
    FIRST_REST,
    LAST_REST,
    LONGEST,
    PROBE_DISTANCE,
    QUIET,
    SHORTEST,
    TRIALS,
    WORTH,
    DraftPolicy,
    NgramIndex,
    Record,
)

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def looked_up(tokens: list[int], count: int) -> list[int]:
    """The rule, the slow way: the longest run that ends the tokens and came before; what followed it the last time."""
    for order in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(tokens) - 1, order - 1, -1):
            if order < len(tokens) and tokens[place - order : place] == tokens[-order:]:
                whole = list(tokens)
                for at in range(place, place + count):
                    whole.append(whole[at])
                return whole[len(tokens) :]
    return []


@given(TOKENS, st.integers(1, 6), st.data())
def test_the_index_finds_what_a_search_finds(tokens: list[int], count: int, data: st.DataObject) -> None:
    """Whatever the sequence was when it was asked before."""
    index = NgramIndex()
    for cut in sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=4))):
        index.propose(tokens[:cut], 2)
    assert index.propose(tokens, count) == looked_up(tokens, count)


def test_what_repeats_is_drafted_as_far_as_asked() -> None:
    assert NgramIndex().propose([1, 2, 3, 9, 1, 2, 3], 9) == [9, 1, 2, 3, 9, 1, 2, 3, 9]
    assert NgramIndex().propose([1, 2, 3, 4], 5) == []


def test_a_run_that_came_too_often_is_looked_for_a_while() -> None:
    index, tokens = NgramIndex(), [5, 1, 2, *[9, 1, 2] * 5000, 5, 1, 2]
    assert index.propose(tokens, 1) == [5]  # the longest run, 5 1 2, lies too far back


def policy(fixed: float, each: float, rows: int = 1, limit: int = 5, rate: float | None = None) -> DraftPolicy:
    """One that has measured what drafts cost, in plain steps, and seen `rate` of all drafts accepted."""
    made = DraftPolicy(limit)
    for _ in range(BASELINE_STEPS):
        assert made.awake() and made.measures(rows)
        made.timed(rows, 0, 1.0)
    assert not made.measures(rows)
    for drafts in (1, 3):
        made.timed(rows, drafts * rows, 1.0 + fixed + drafts * each)
    for number in range(0 if rate is None else 200):
        made.learn(Record(), 0, min(limit, 1 + number % 2), int(number % 100 < 100 * (rate or 0)))
    return made


COUNT = st.integers(1, 9)


@given(st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.integers(0, 30), st.integers(0, 30), COUNT, COUNT)
def test_the_number_of_drafts_gives_most_tokens_a_second(
    fixed: float, each: float, hits: int, misses: int, rows: int, limit: int
) -> None:
    """No other number does, and it gives clearly more than none."""
    made, record = policy(fixed, each, rows, limit), Record()
    for hit in [1] * hits + [0] * misses:
        made.learn(record, 0, 1, hit)
    rate = made.rate(record)
    speeds = [sum(rate**j for j in range(k + 1)) / (1 + fixed + k * each) for k in range(1, limit + 1)]
    chosen = made.best(record, rows)
    assert ([WORTH, *speeds])[chosen] == pytest.approx(max([WORTH, *speeds]), abs=1e-6)


def test_one_number_of_drafts_says_half_of_what_others_cost() -> None:
    made = DraftPolicy(4)
    made.timed(2, 0, 1.0)
    made.timed(2, 4, 1.8)
    assert made.times.extra(2) == pytest.approx([0.6, 0.8, 1.0, 1.2])


def steps(made: DraftPolicy, count: int, accepted: float, rows: int = 1) -> list[int]:
    """The step numbers in which one request of text without end gets drafts, and what becomes of them."""
    record, found = Record(), []
    for length in range(count):
        if not made.awake():
            continue
        if made.measures(rows):
            made.timed(rows, 0, 1.0)
            continue
        drafts = made.wanted(record, length, rows)
        if not drafts:
            made.idle("unwanted" if made.best(Record(), rows) == 0 else "refused")
            continue
        made.drafts()
        found.append(length)
        made.timed(rows, drafts * rows, 1.4 + 0.2 * drafts)
        made.learn(record, length, drafts, int(accepted * drafts))
    return found


def test_where_drafting_loses_it_rests_ever_longer() -> None:
    found = steps(DraftPolicy(3), 60000, 0.0)
    gaps = [b - a for a, b in zip(found, found[1:], strict=False)]
    assert gaps[TRIALS - 1] >= FIRST_REST and LAST_REST <= max(gaps) < LAST_REST + 50
    assert len(found) / 60000 < 0.002


def test_where_drafting_gains_it_never_rests() -> None:
    made = DraftPolicy(3)
    found = steps(made, 2000, 1.0)
    assert len(found) > 1950 and not made.resting


def test_what_repeats_after_a_rest_is_drafted_again() -> None:
    made = DraftPolicy(3)
    steps(made, 1000, 0.0)
    assert made.resting
    found = steps(made, 2 * FIRST_REST, 1.0)
    assert found[0] <= FIRST_REST and len(found) > 1.9 * FIRST_REST - found[0]


def test_a_trial_goes_on_with_more_drafts_only_where_one_does_well() -> None:
    for accepted, wanted in ((1, 4), (0, 0)):
        made, record = DraftPolicy(4), Record()
        for _ in range(BASELINE_STEPS):
            made.timed(1, 0, 1.0)
        for _ in range(TRIALS):
            assert made.wanted(record, 9, 1) == 1
            made.timed(1, 1, 1.9)
            made.learn(record, 9, 1, accepted)
        assert made.wanted(record, 9, 1) == wanted


def test_nothing_to_propose_is_looked_for_now_and_then() -> None:
    made, looked = DraftPolicy(3), []
    for step in range(400):
        if made.awake():
            looked.append(step)
            made.idle("unfound")
    first = QUIET["unfound"]
    assert looked[:first] == list(range(first))
    assert {b - a for a, b in zip(looked[first - 1 :], looked[first:], strict=False)} == {DRY_REST}


def test_one_request_that_loses_is_probed_alone_and_seldom() -> None:
    """Others go on; its own probes are far apart, and no two such requests are probed at once."""
    made, bad = policy(0.1, 0.1, rate=1.0), [Record(), Record()]
    for record in bad:
        for _ in range(20):
            made.learn(record, 0, 1, 0)
    for _ in range(100):
        made.learn(Record(), 0, 2, 2)
    probes = []
    for length in range(1000):
        made.awake()
        made.drafts()  # somebody else's
        for record in bad:
            if made.wanted(record, length, 1):
                probes.append(length)
                made.learn(record, length, 1, 0)
    assert 4 <= len(probes) < 10
    assert min(b - a for a, b in zip(probes, probes[1:], strict=False)) >= min(FIRST_PAUSE, PROBE_DISTANCE)


def test_fixed_is_fixed() -> None:
    made = DraftPolicy(4, adaptive=False)
    record = Record()
    for _ in range(20):
        assert made.awake() and made.wanted(record, 0, 1) == 4 and not made.measures(1)
        made.learn(record, 0, 4, 0)
        made.idle("unwanted")
    assert made.awake()
