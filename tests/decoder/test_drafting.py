"""What is drafted and how much: looked-up runs, and the rule of cost against acceptance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.drafting import FIRST_PAUSE, LAST_PAUSE, ORDERS, DraftPolicy, NgramIndex, Record

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def looked_up(tokens: list[int], count: int) -> list[int]:
    """The rule, the slow way: the longest run that ends the tokens and came before; what followed it the last time."""
    for order in ORDERS:
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


def policy(cost: float, rows: int = 1, limit: int = 5) -> DraftPolicy:
    """One that has measured that a draft costs `cost` plain tokens."""
    made = DraftPolicy(limit)
    for _ in range(3):
        assert made.measures(rows)
        made.timed(rows, 0, 1.0)
    assert not made.measures(rows)
    made.timed(rows, 4, 1.0 + 4 * cost / rows)
    assert made.cost(rows) == pytest.approx(cost)
    return made


@given(st.floats(0.01, 2.0), st.integers(0, 30), st.integers(0, 30), st.integers(1, 9), st.integers(1, 9))
def test_the_number_of_drafts_gains_most(cost: float, hits: int, misses: int, rows: int, limit: int) -> None:
    """No other number has a higher expected gain: accepted drafts less what all drafts cost."""
    made, record = policy(cost, rows, limit), Record()
    for hit in [1] * hits + [0] * misses:
        made.learn(record, 0, 1, hit)
    rate = made.rate(record)
    gains = [sum(rate**j for j in range(1, k + 1)) - k * cost for k in range(limit + 1)]
    chosen = made.wanted(record, 0, rows)
    assert gains[chosen] == pytest.approx(max(gains), abs=1e-9)


def test_where_drafting_loses_it_stops_and_probes_ever_less() -> None:
    made, record = policy(0.5), Record()
    length, probes = 0, []
    for length in range(4000):
        if (drafts := made.wanted(record, length, 1)) > 0:
            probes.append(length)
            made.learn(record, length, drafts, 0)
    gaps = [b - a for a, b in zip(probes, probes[1:], strict=False)]
    assert gaps[-1] == LAST_PAUSE and FIRST_PAUSE * 2 in gaps
    assert len(probes) < 20
    for length in range(4000, 6000):
        if (drafts := made.wanted(record, length, 1)) > 0:
            made.learn(record, length, drafts, drafts)
    assert made.wanted(record, 6000, 1) > 1


def test_a_new_request_begins_with_what_is_known_of_others() -> None:
    made, other = policy(0.3), Record()
    assert made.wanted(Record(), 0, 1) > 0
    for length in range(300):
        made.learn(other, length, 1, 0)
    assert made.wanted(Record(), 0, 1) == 0


def test_fixed_is_fixed() -> None:
    made = DraftPolicy(4, adaptive=False)
    record = Record()
    for _ in range(20):
        assert made.wanted(record, 0, 1) == 4 and not made.measures(1)
        made.learn(record, 0, 4, 0)
