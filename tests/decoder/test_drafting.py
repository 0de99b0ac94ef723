"""Drafts and their number: runs that are looked up, and the rule that weighs cost against acceptance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.drafting import (
    BASELINE_AGE,
    BASELINE_STEPS,
    DRY_PAUSE,
    FIRST_EACH,
    FIRST_FIXED,
    FIRST_GAP,
    FIRST_PAUSE,
    FIRST_RATE,
    FORGET,
    FORGET_ALL,
    LAST_GAP,
    LAST_PAUSE,
    LONGEST,
    PAUSE_SAMPLES,
    PROBE_DISTANCE,
    QUIET,
    SHORTEST,
    TRIALS,
    WORTH,
    DraftPolicy,
    NgramIndex,
    Record,
    StepTimes,
)

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def looked_up(tokens: list[int], count: int) -> list[int]:
    """A simple implementation of the rule: finds the longest run at the end of the tokens that occurred before, and
    returns the tokens that followed its last occurrence."""
    for order in range(LONGEST, SHORTEST - 1, -1):
        for place in range(len(tokens) - 1, order - 1, -1):
            if order < len(tokens) and tokens[place - order : place] == tokens[-order:]:
                whole = list(tokens)
                for at in range(place, place + count):
                    whole.append(whole[at])
                return whole[len(tokens) :]
    return []


@given(TOKENS, st.integers(1, 6), st.booleans(), st.data())
def test_the_index_finds_what_a_search_finds(tokens: list[int], count: int, shares: bool, data: st.DataObject) -> None:
    """Whatever queries were made for the sequence before, and where another sample made the index of its prompt."""
    index, first = NgramIndex(), tokens[:1]
    if shares:
        first = tokens[: data.draw(st.integers(1, len(tokens)))]
        prompt = NgramIndex.of(first)
        other, index = NgramIndex(prompt), NgramIndex(prompt)
        other.propose([*first, *data.draw(TOKENS)], 2)
    for cut in sorted(data.draw(st.sets(st.integers(len(first), len(tokens)), max_size=4))):
        index.propose(tokens[:cut], 2)
    assert index.propose(tokens, count) == looked_up(tokens, count)


def test_what_repeats_is_drafted_as_far_as_asked() -> None:
    assert NgramIndex().propose([1, 2, 3, 9, 1, 2, 3], 9) == [9, 1, 2, 3, 9, 1, 2, 3, 9]
    assert NgramIndex().propose([1, 2, 3, 4], 5) == []


def test_a_longer_run_in_the_prompt_is_found_behind_one_in_the_output() -> None:
    prompt = [5, 1, 2, 7]
    for index in (NgramIndex(), NgramIndex(NgramIndex.of(prompt))):
        assert index.propose([*prompt, 1, 2, 8, 5, 1, 2], 1) == [7]


def test_a_run_that_came_too_often_is_looked_for_a_while() -> None:
    index, tokens = NgramIndex(), [5, 1, 2, *[9, 1, 2] * 5000, 5, 1, 2]
    assert index.propose(tokens, 1) == [5]  # the longest run, 5 1 2, lies too far back


def policy(fixed: float, each: float, rows: int = 1, limit: int = 5, rate: float | None = None) -> DraftPolicy:
    """A policy that has measured the cost of drafts, in plain steps, and seen `rate` of all drafts accepted."""
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
    """No other number gives more tokens per second, and it is clearly better than none."""
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
    """The step numbers in which one endless request gets drafts, of which `accepted` are accepted."""
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
    assert gaps[TRIALS - 1] >= FIRST_PAUSE and LAST_PAUSE <= max(gaps) < LAST_PAUSE + 50
    assert len(found) / 60000 < 0.002


def test_where_drafting_gains_it_never_rests() -> None:
    made = DraftPolicy(3)
    found = steps(made, 2000, 1.0)
    assert len(found) > 1950 and not made.paused


def test_what_repeats_after_a_rest_is_drafted_again() -> None:
    made = DraftPolicy(3)
    steps(made, 1000, 0.0)
    assert made.paused
    found = steps(made, 2 * FIRST_PAUSE, 1.0)
    assert found[0] <= FIRST_PAUSE and len(found) > 1.9 * FIRST_PAUSE - found[0]


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
    assert {b - a for a, b in zip(looked[first - 1 :], looked[first:], strict=False)} == {DRY_PAUSE}


def test_one_request_that_loses_is_probed_alone_and_seldom() -> None:
    """The others continue; its own probes are far apart, and no two such requests are probed at once."""
    made, bad = policy(0.1, 0.1, rate=1.0), [Record(), Record()]
    for record in bad:
        for _ in range(20):
            made.learn(record, 0, 1, 0)
    for _ in range(100):
        made.learn(Record(), 0, 2, 2)
    probes = []
    for length in range(1000):
        made.awake()
        made.drafts()  # of another request
        for record in bad:
            if made.wanted(record, length, 1):
                probes.append(length)
                made.learn(record, length, 1, 0)
    assert 4 <= len(probes) < 10
    assert min(b - a for a, b in zip(probes, probes[1:], strict=False)) >= min(FIRST_GAP, PROBE_DISTANCE)


def test_fixed_is_fixed() -> None:
    made = DraftPolicy(4, adaptive=False)
    record = Record()
    for _ in range(20):
        assert made.awake() and made.wanted(record, 0, 1) == 4 and not made.measures(1)
        made.learn(record, 0, 4, 0)
        made.idle("unwanted")
    assert made.awake()


# -- what steps take ---------------------------------------------------------------------------------------------------


def test_plain_steps_are_measured_again_when_they_are_old() -> None:
    times = StepTimes(3)
    for number in range(BASELINE_STEPS):
        assert times.wants_plain(2, 10)
        times.add(2, 0, 1.0 + number % 2, 10)
    assert not times.wants_plain(2, 10 + BASELINE_AGE) and times.wants_plain(2, 11 + BASELINE_AGE)
    assert times.wants_plain(1, 10) and times.plain(2) == 1.5
    times.add(2, 0, 5.0, 10 + BASELINE_AGE)  # not old yet: one of several
    assert times.plain(2) == 2.0
    times.add(2, 0, 7.0, 11 + 2 * BASELINE_AGE)  # earlier measurements are forgotten
    assert times.plain(2) == 7.0 and times.wants_plain(2, 11 + 2 * BASELINE_AGE)


def test_a_plain_step_takes_no_longer_than_one_of_more_rows() -> None:
    times = StepTimes(3)
    for rows, seconds in ((1, 2.0), (4, 1.5), (3, 1.0)):
        times.add(rows, 0, seconds, 1)
    assert [times.plain(rows) for rows in (1, 3, 4)] == [1.0, 1.0, 1.5]


def measured(*points: tuple[int, int, float], limit: int = 3) -> list[float]:
    """The estimated cost of drafts in steps of two rows, which take a second without drafts, from measurements (rows,
    drafts, seconds)."""
    times = StepTimes(limit)
    times.add(2, 0, 1.0, 1)
    times.add(3, 0, 1.0, 1)
    for rows, drafts, seconds in points:
        times.add(rows, drafts, seconds, 1)
    return times.extra(2)


def test_what_drafts_add_is_a_line_through_what_was_measured() -> None:
    assert measured() == pytest.approx([FIRST_FIXED + FIRST_EACH * k for k in (1, 2, 3)])
    assert measured((2, 3, 1.6)) == pytest.approx([0.5, 0.7, 0.9])  # 1.5 drafts a row: half fixed, half for each
    assert measured((2, 1, 1.6)) == pytest.approx([0.9, 1.5, 2.1])  # half a draft a row
    assert measured((2, 2, 1.6), (2, 6, 1.2)) == pytest.approx([0.4, 0.4, 0.4])  # more drafts take no less
    assert measured((2, 2, 0.5), (2, 6, 1.6)) == pytest.approx([0.0, 0.3, 0.6])  # and none gives time back
    assert measured((3, 3, 1.2), (2, 6, 1.6)) == pytest.approx([0.2, 0.4, 0.6])  # steps of 2 and 3 rows have one size
    assert measured((4, 4, 9.0), (2, 4, 1.4)) == pytest.approx([0.3, 0.4, 0.5])  # 4 rows have no plain step to compare


def test_new_measurements_count_at_once_and_old_ones_not_for_ever() -> None:
    times = StepTimes(1)
    times.add(1, 0, 1.0, 1)
    for _ in range(15):
        times.add(1, 1, 1.4, 1)
    assert times.extra(1) == pytest.approx([0.4])
    for _ in range(8):
        times.add(1, 1, 1.8, 1)
    assert times.extra(1) == pytest.approx([0.8])
    for _ in range(31):
        times.add(1, 0, 1.0, 1)
    for _ in range(16):
        times.add(1, 0, 3.0, 1)
    assert times.plain(1) == 3.0


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_only_drafts_that_were_looked_at_are_learned_from() -> None:
    made, record = DraftPolicy(4), Record()
    made.learn(record, 9, 4, 1)
    assert (record.hits, record.trials) == (made.all.hits, made.all.trials) == (1, 2)
    made.learn(record, 9, 2, 2)
    assert (record.hits, record.trials) == pytest.approx((FORGET + 2, 2 * FORGET + 2))
    assert (made.all.hits, made.all.trials) == pytest.approx((FORGET_ALL + 2, 2 * FORGET_ALL + 2))
    made.learn(record, 9, 3, 0)
    assert record.trials == pytest.approx((2 * FORGET + 2) * FORGET + 1)


def test_a_request_that_nobody_knows_is_taken_for_all_others() -> None:
    made = DraftPolicy(4)
    assert made.rate(Record()) == FIRST_RATE
    for _ in range(300):
        made.learn(Record(), 0, 1, 0)
    assert made.rate(Record()) < 0.02
    assert 0.4 < made.rate(Record(hits=6.0, trials=9.0)) < 0.6


def test_gaps_grow_to_a_limit_and_end_with_a_hit() -> None:
    made, record = policy(0.1, 0.1, rate=0.0), Record(resume_at=100)
    assert not made.on_trial
    length, pauses = 100, []
    for _ in range(5):
        made.learn(record, length, 1, 0)
        assert record.resume_at == length + record.gap
        pauses.append(record.gap)
        length = record.resume_at
    assert pauses == [128, 256, LAST_GAP, LAST_GAP, LAST_GAP]
    made.learn(record, length, 1, 1)
    assert (record.gap, record.resume_at) == (FIRST_GAP, 0)
    made.learn(record, length, 1, 0)  # it is not being probed
    assert (record.gap, record.resume_at) == (FIRST_GAP, 0)


def test_a_probe_waits_for_its_length_and_for_a_quiet_time_to_end() -> None:
    made, record = policy(0.1, 0.1, rate=1.0), Record()
    for _ in range(40):
        made.learn(record, 0, 1, 0)
    for _ in range(100):
        made.learn(Record(), 0, 2, 2)
    made.awake()
    made.drafts()
    assert made.wanted(record, 50, 1) == 0 and record.resume_at == 50 + FIRST_GAP
    assert made.wanted(record, 49 + FIRST_GAP, 1) == 0
    made.idle("refused")
    assert made.wanted(record, 50 + FIRST_GAP, 1) == 0
    made.drafts()
    assert made.wanted(record, 50 + FIRST_GAP, 1) == 1


# -- pauses ------------------------------------------------------------------------------------------------------------


def pause_of(made: DraftPolicy, reason: str) -> int:
    """Steps of the pause that begins after enough idle steps."""
    for _ in range(QUIET[reason] - 1):
        assert made.awake()
        made.idle(reason)
    made.awake()
    assert not made.paused
    made.idle(reason)
    assert made.paused
    steps = 1
    while not made.awake():
        steps += 1
    return steps


@pytest.mark.parametrize("reason", ["unwanted", "refused", "unready"])
def test_a_rest_begins_after_so_many_quiet_steps_and_the_next_one_is_longer(reason: str) -> None:
    made = DraftPolicy(3)
    assert [pause_of(made, reason) for _ in range(5)] == [1024, 2048, 4096, LAST_PAUSE, LAST_PAUSE]


def test_a_step_with_drafts_ends_a_quiet_time() -> None:
    made = DraftPolicy(3)
    for _ in range(3):
        for _ in range(QUIET["unwanted"] - 1):
            made.idle("unwanted")
        made.drafts()
    assert not made.paused


def test_after_a_rest_everything_is_found_out_anew() -> None:
    made = policy(0.1, 0.1, rate=0.0)
    assert not made.on_trial and made.rate(Record()) < 0.05
    pause_of(made, "unwanted")
    assert made.on_trial and made.rate(Record()) == FIRST_RATE
    assert made.wanted(Record(), 9, 1) == 1


def test_drafts_that_gain_make_the_next_rest_short() -> None:
    made = DraftPolicy(3)
    assert [pause_of(made, "unwanted") for _ in range(3)] == [1024, 2048, 4096]
    for _ in range(BASELINE_STEPS):
        made.timed(1, 0, 1.0)
    made.timed(1, 1, 1.1)
    for _ in range(2 * TRIALS):
        made.learn(Record(), 9, made.wanted(Record(), 9, 1), made.wanted(Record(), 9, 1))
    assert not made.on_trial and made.wanted(Record(), 9, 1) > 0
    made.drafts()
    assert pause_of(made, "unwanted") == FIRST_PAUSE


def test_a_rest_is_measured_now_and_then() -> None:
    made = DraftPolicy(3)
    for _ in range(QUIET["unwanted"]):
        assert made.measuring
        made.idle("unwanted")
    found = [made.measuring for _ in range(4 * PAUSE_SAMPLES) if not made.awake()]
    assert len(found) == 4 * PAUSE_SAMPLES and sum(found) == 4


def test_a_trial_of_at_most_one_draft_has_one_part() -> None:
    for limit, more in ((1, False), (2, True)):
        made = DraftPolicy(limit)
        for _ in range(TRIALS):
            assert made.on_trial
            made.learn(Record(), 9, 1, 1)
        assert made.on_trial == more
