"""A different token is acceptable only if rounding can exceed its margin."""

from __future__ import annotations

import functools

import pytest
from margins import excused
from speculation import answers

RUN = functools.partial(answers, "MM", count=1, output=10, state_cache="none")


@pytest.fixture(scope="module")
def drawn() -> list[int]:
    return RUN().drawn["0"][0]


def test_a_token_that_could_not_be_drawn_is_no_rounding(drawn: list[int]) -> None:
    wrong = (drawn[3] + 1) % 97
    ok, error = excused("0", drawn[:3], wrong, RUN, functools.partial(RUN, max_chunk=1))
    assert not ok and error < 1e-4


def test_the_token_itself_can_be_drawn(drawn: list[int]) -> None:
    assert excused("0", drawn[:3], drawn[3], RUN, functools.partial(RUN, max_chunk=1))[0]
