"""Rates and budgets: the totals are correct, with a clock that the test sets."""

from __future__ import annotations

import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from service.common.errors import ResourceExhausted, Unavailable
from service.common.limits import ByteBudget, Places, RateLimits, TokenBucket


@given(st.floats(1, 1e6), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e5)), max_size=40))
def test_a_bucket_gives_no_more_than_a_minute_ahead_and_its_rate(rate: float, steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, clock)
    taken, began = 0.0, clock.now
    for pause, amount in steps:
        clock.now += pause
        if bucket.wait(amount) == 0:
            bucket.charge(amount)
            taken += min(amount, rate)
        assert taken <= rate + (clock.now - began) * rate / 60 + 1e-6 * rate


def test_the_wait_is_what_it_takes() -> None:
    clock = Clock()
    limits = RateLimits({"requests": 60}, clock)
    for _ in range(60):
        limits.admit("requests", 1)
    with pytest.raises(ResourceExhausted) as error:
        limits.admit("requests", 1)
    assert error.value.reason == "RATE_LIMITED" and error.value.quota == "requests_per_minute"
    assert error.value.retry_after == pytest.approx(1.0)
    clock.now += 1.0
    limits.admit("requests", 1)
    with pytest.raises(ResourceExhausted):
        limits.admit("requests", 1)


def test_a_debt_is_paid_before_the_next_call() -> None:
    clock = Clock()
    limits = RateLimits({"tokens": 60}, clock)
    limits.admit("tokens", 0)
    limits.charge("tokens", 90)
    with pytest.raises(ResourceExhausted) as error:
        limits.admit("tokens", 0)
    assert error.value.retry_after == pytest.approx(30.0)
    clock.now += 30.0
    limits.admit("tokens", 0)
    limits.admit("bytes", 10**12)  # no limit of that kind


def test_the_byte_budget_is_given_back() -> None:
    budget = ByteBudget(100)
    with budget.hold() as add:
        add(60)
        with budget.hold() as other:
            with pytest.raises(Unavailable, match="100"):
                other(41)
            other(40)
            assert budget.used == 100
        assert budget.used == 60
    assert budget.used == 0


def test_waiting_would_never_help_a_call_that_is_larger_than_all() -> None:
    budget = ByteBudget(100, share=60)
    for owner, most in (("", 100), ("a", 60)):
        with budget.hold(owner) as add:
            add(most)
            with pytest.raises(Unavailable) as never:
                add(1)
            assert never.value.never_retry and never.value.retry_after is None
            add(0)
            add(-most)
    assert budget.used == 0


def test_a_tenant_s_share_is_that_of_all_its_calls_and_of_nobody_else() -> None:
    budget = ByteBudget(100, share=60)
    with budget.hold("a") as one, budget.hold("a") as two, budget.hold("b") as other:
        one(40)
        with pytest.raises(ResourceExhausted) as full:
            two(21)
        assert full.value.reason == "TENANT_QUEUE_FULL" and full.value.retry_after is not None
        two(20)
        with pytest.raises(Unavailable) as busy:  # it is within its share, but the total is used up
            other(41)
        assert not busy.value.never_retry and busy.value.retry_after is not None
        other(40)
        one(-15)
        two(15)
        with pytest.raises(ResourceExhausted):
            one(1)
    with budget.hold("a") as one:
        one(60)
    assert budget.used == 0 and not budget._owned


def test_callers_without_a_key_share_all_of_it() -> None:
    budget = ByteBudget(100, share=60)
    with budget.hold() as one, budget.hold() as two:
        one(60)
        two(40)


def test_places_are_each_tenant_s_own_and_come_back() -> None:
    places = Places(2, "requests")
    with places.hold("a"):
        with places.hold("a"), places.hold("b"):
            for _ in range(2):
                with pytest.raises(ResourceExhausted, match="2 requests") as full, places.hold("a"):
                    pass
                assert full.value.quota == "tenant_requests" and full.value.retry_after is not None
        with places.hold("a"):
            pass
    with places.hold(""), places.hold(""), places.hold(""):  # callers without a key have no limit of their own
        pass
    assert not places._held


def test_idleness_is_saved_up_for_a_minute_and_no_longer() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.charge(60)
    clock.now += 3600
    assert bucket.wait(60) == 0
    bucket.charge(60)
    assert bucket.wait(1) == pytest.approx(1.0)
    clock.now += 0.5
    assert bucket.wait(1) == pytest.approx(0.5)


def test_more_than_a_minute_s_worth_is_had_from_a_full_bucket_and_then_paid_back() -> None:
    clock = Clock()
    limits = RateLimits({"bytes": 60}, clock)
    limits.admit("bytes", 1)
    with pytest.raises(ResourceExhausted) as early:  # a nearly full budget does not suffice
        limits.admit("bytes", 600)
    assert early.value.retry_after == pytest.approx(1.0)
    clock.now += 1.0
    limits.admit("bytes", 600)
    with pytest.raises(ResourceExhausted) as error:
        limits.admit("bytes", 0)
    assert error.value.retry_after == pytest.approx(540.0)
    clock.now += 539.0
    with pytest.raises(ResourceExhausted):
        limits.admit("bytes", 0)
    clock.now += 1.0
    limits.admit("bytes", 0)
    with pytest.raises(ResourceExhausted):
        limits.admit("bytes", 1)


def test_a_call_of_the_whole_minute_is_had_at_once() -> None:
    limits = RateLimits({"tokens": 60}, Clock())
    limits.admit("tokens", 60)
    with pytest.raises(ResourceExhausted):
        limits.admit("tokens", 0.001)
    assert limits.limited and not RateLimits({}).limited
