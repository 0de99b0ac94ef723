"""Rates and budgets: sums that must come out, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import ResourceExhausted, Unavailable
from service.limits import ByteBudget, RateLimits, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
