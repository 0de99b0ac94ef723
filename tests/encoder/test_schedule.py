"""The order of the queue and its guarantees: neither large nor small images starve, whatever other images arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.schedule import HEAD_START, Waiting, choose, due, small_share


def items(*tokens: int) -> list[Waiting]:
    """Images that arrived one after the other."""
    return [Waiting(count, float(index)) for index, count in enumerate(tokens)]


def test_first_in_first_out_within_the_step() -> None:
    assert choose(items(40, 40, 40, 40), 120) == [0, 1, 2]
    assert choose(items(40, 90, 10), 120) == [0, 2], "10 is small: it does not wait behind 90"
    assert choose([], 100) == []


def test_one_image_is_always_taken() -> None:
    assert choose(items(500, 500), 100) == [0]


def test_small_ones_pass_large_ones_only_in_their_share() -> None:
    waiting = items(800, 800, *[50] * 10)
    assert choose(waiting, 800) == [0, 2, 3], "two of fifty, an eighth of the step, beside the first large one"


def test_a_stream_of_small_ones_does_not_hold_up_a_large_one() -> None:
    waiting = [Waiting(700, 5.0), *[Waiting(80, float(index)) for index in range(5)]]
    assert 0 not in choose(waiting, 800)[:-1]
    later = [Waiting(700, 5.0), *[Waiting(80, 6.0 + index) for index in range(50)]]
    assert 0 in choose(later, 800)


def test_deadlines_and_priorities_move_ahead() -> None:
    waiting = [Waiting(60, 0.0), Waiting(60, 1.0, deadline=2.0), Waiting(60, 2.0, priority=9), Waiting(60, 3.0)]
    assert choose(waiting, 60)[0] == 1
    assert [due(item) for item in waiting] == [10.0, 2.0, 3.0, 13.0]
    assert choose(waiting, 240) == [1, 2, 0, 3]
    assert choose([waiting[0], waiting[2]], 60) == [1]


def test_a_far_deadline_puts_nothing_off_and_a_missed_one_is_no_licence() -> None:
    assert due(Waiting(1, 5.0, deadline=1e9)) == due(Waiting(1, 5.0)) == 15.0
    assert due(Waiting(1, 5.0, deadline=-1e9)) == 5.0


def test_priorities_are_bounded_on_both_sides() -> None:
    """A client's 2**31 counts as 100, so its effect on others is limited; the same for -2**31."""
    at = {level: due(Waiting(1, 5.0, priority=level)) for level in (-(2**31), -100, -99, 0, 99, 100, 2**31)}
    assert at[2**31] == at[100] == 15.0 - 100 and at[-(2**31)] == at[-100] == 15.0 + 100
    assert at[100] < at[99] < at[0] < at[-99] < at[-100]
    late = [Waiting(60, 500.0, priority=2**31 - 1), Waiting(60, 0.0), Waiting(60, 200.0, priority=-(2**31))]
    assert choose(late, 60)[0] == 1 and choose([late[2], Waiting(60, 400.0)], 60)[0] == 0


def test_images_of_one_request_are_taken_in_several_steps() -> None:
    waiting = [Waiting(60, 1.0) for _ in range(5)]
    assert choose(waiting, 130) == [0, 1]


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        (lambda: choose(items(1), 0), "got 0"),
        (lambda: choose(items(4, 0), 10), "image 1 has 0"),
    ],
)
def test_misuse_names_the_numbers(call: object, numbers: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=numbers):
        call()


@dataclass
class Waiter:
    """An image in the simulation, with the images due no later that waited at the same time."""

    item: Waiting
    key: tuple[float, float, int]
    steps: int = 0
    ahead: dict[int, int] = field(default_factory=dict)


arrivals = st.lists(
    st.builds(
        lambda tokens, gap, deadline, priority: (tokens, gap, deadline, priority),
        st.integers(1, 60) | st.integers(1, 2000),
        st.sampled_from([0.0, 0.0, 0.1, 3.0]),
        st.none() | st.floats(-5, 30),
        st.integers(-3, 3),
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=300)
@given(arriving=arrivals, step_tokens=st.integers(1, 1200), per_step=st.integers(1, 8))
def test_the_stated_bounds_hold_in_any_stream(
    arriving: list[tuple[int, float, float | None, int]], step_tokens: int, per_step: int
) -> None:
    share = small_share(step_tokens)
    now = 0.0
    stream: list[Waiting] = []
    for tokens, gap, deadline, priority in arriving:
        now += gap
        stream.append(Waiting(tokens, now, None if deadline is None else now + deadline, priority))
    waiting: dict[int, Waiter] = {}
    position = 0
    while position < len(stream) or waiting:
        for _ in range(per_step):
            if position < len(stream):
                item = stream[position]
                waiting[position] = Waiter(item, (due(item), item.arrival, position))
                position += 1
        names = list(waiting)
        for name in names:
            waiter = waiting[name]
            waiter.steps += 1
            waiter.ahead.update({n: waiting[n].item.tokens for n in names if waiting[n].key <= waiter.key})
        chosen = [names[index] for index in choose([waiting[name].item for name in names], step_tokens)]
        assert chosen and chosen == sorted(chosen, key=lambda name: waiting[name].key)
        tokens_taken = [waiting[name].item.tokens for name in chosen]
        assert sum(tokens_taken) <= max(step_tokens, 2 * share + max(tokens_taken))
        assert min(waiting, key=lambda name: waiting[name].key) == chosen[0]
        for name in chosen:
            waiter = waiting.pop(name)
            assert waiter.steps <= len(waiter.ahead)
            if waiter.item.tokens <= share:
                small = sum(tokens for tokens in waiter.ahead.values() if tokens <= share)
                assert waiter.steps <= math.ceil(small / share)


def test_nothing_overtakes_after_the_stated_moment() -> None:
    old = Waiting(50, 0.0)
    for priority in range(4):
        latest = due(old) + priority * HEAD_START
        newcomer = Waiting(50, latest + 1e-6, deadline=latest + 1e-6, priority=priority)
        assert choose([newcomer, old], 50)[0] == 1
        assert choose([Waiting(50, latest - 1e-6, deadline=0, priority=priority), old], 50)[0] == 0


def test_a_step_ends_before_the_first_that_does_not_fit() -> None:
    """Later images wait as well, even if they would fit, so that none can be overtaken for ever."""
    waiting = [Waiting(tokens, arrival) for arrival, tokens in enumerate((60, 50, 30))]
    assert choose(waiting, 100) == [0]
    assert choose(waiting, 110) == [0, 1]
    assert choose(waiting, 140) == [0, 1, 2]
    assert choose([Waiting(500, 0.0), *waiting], 100) == [0]
