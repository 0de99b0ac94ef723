"""Constraints over token ids: at each step of random walks they allow exactly the tokens that their definition
allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from constrained import BadRuns

from decoder.constraints import Constraint, Mask
from decoder.token_constraints import AllOf, AllowedTokens, ReasoningBudget

VOCAB = 12
Allowed = Callable[[list[int]], set[int]]
"""By definition: the tokens that may follow an output."""


def mask_of(constraint: Constraint) -> set[int]:
    words = np.full(1, 0x5A5A5A5A, np.uint32)
    constraint.fill_mask(Mask.over(words))
    return {token for token in range(VOCAB) if int(words[0]) >> token & 1}


def walk(make: Callable[[], Constraint], allowed: Allowed, seed: int, steps: int = 60) -> None:
    draw, constraint, text = random.Random(seed), make(), list[int]()
    for _ in range(steps):
        now = allowed(text)
        assert mask_of(constraint) == now, text
        guess = [draw.randrange(VOCAB) for _ in range(6)]
        if draw.random() < 0.5 and now:
            guess = [draw.choice(sorted(now)), *guess]
        taken = next((at for at in range(len(guess)) if guess[at] not in allowed(text + guess[:at])), len(guess))
        assert constraint.valid_prefix(guess) == taken, (text, guess)
        coming = constraint.forced()
        assert all({token} == allowed(text + coming[:at]) for at, token in enumerate(coming)), (text, coming)
        if draw.random() < 0.2:
            count = draw.randrange(min(len(text), 5) + 1)
            constraint.rollback(count)
            del text[len(text) - count :]
        elif draw.random() < 0.2:
            constraint, old = constraint.copy(), constraint
            if now:
                old.accept(min(now))  # does not affect the copy
        elif now:
            text.append(draw.choice(sorted(now)))
            constraint.accept(text[-1])
    assert make().valid_prefix(text) == len(text)


def only(tokens: Sequence[int]) -> Allowed:
    return lambda text: set(tokens)


def without(runs: Sequence[Sequence[int]]) -> Allowed:
    def allowed(text: list[int]) -> set[int]:
        return {t for t in range(VOCAB) if not any([*text, t][-len(run) :] == list(run) for run in runs)}

    return allowed


def budget(
    close: list[int], limit: int | None, inner: Allowed | None, opening: Sequence[int] = (), ends: Sequence[int] = ()
) -> Allowed:
    def allowed(text: list[int]) -> set[int]:
        after = inner or only(range(VOCAB))
        for at, token in enumerate(opening):
            if at == len(text):
                return {token} | (after([]) if at == 0 else set())
            if text[at] != token:
                return after(text)
        body = text[len(opening) :]
        for end in range(len(body) + 1):
            if body[:end][-len(close) :] == close:
                return after(body[end:])
        if limit is not None and len(body) >= limit:
            held = max(size for size in range(len(close)) if body[len(body) - size :] == close[:size])
            return {close[held]}
        return set(range(VOCAB)) - set(ends)

    return allowed


RUNS = [[3], [1, 2], [2, 2], [0, 1, 4], [4, 4, 4, 5]]
INNER = [1, 2, 6]
CASES: list[tuple[str, Callable[[], Constraint], Allowed]] = [
    ("allowed", lambda: AllowedTokens(INNER), only(INNER)),
    ("words", lambda: BadRuns(RUNS), without(RUNS)),
    ("all", lambda: AllOf(AllowedTokens([1, 2, 5]), BadRuns(RUNS)), lambda text: {1, 2, 5} & without(RUNS)(text)),
    *(
        (
            f"budget-{close}-{limit}-{opening}",
            lambda close=close, limit=limit, opening=opening: ReasoningBudget(
                close, limit, BadRuns(RUNS), opening=opening, ends=[9]
            ),
            budget(close, limit, without(RUNS), opening, [9]),
        )
        for close in ([7], [7, 7, 8], [7, 8, 7, 6])
        for limit in (None, 0, 4)
        for opening in ([], [10, 11])
    ),
    ("budget-alone", lambda: ReasoningBudget([7, 8], 3), budget([7, 8], 3, None)),
    ("budget-single", lambda: ReasoningBudget([7], 2, AllowedTokens(INNER), opening=[1]),
     budget([7], 2, only(INNER), [1])),
]  # fmt: skip


@pytest.mark.parametrize(("make", "allowed"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_what_is_allowed_is_what_the_definition_allows(make: Callable[[], Constraint], allowed: Allowed) -> None:
    for seed in range(8):
        walk(make, allowed, seed)


def test_ids_beyond_the_vocabulary_change_no_mask() -> None:
    assert mask_of(AllowedTokens([3, 40, 10**9])) == {3}
    assert mask_of(BadRuns([[40], [5], [10**9]])) == set(range(VOCAB)) - {5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllowedTokens([]), "at least one"),
        (lambda: AllowedTokens([3, -1]), "none below 0"),
        (lambda: BadRuns([[3], []]), "at least one"),
        (lambda: BadRuns([[3, -2]]), "none below 0"),
        (lambda: ReasoningBudget([]), "at least one token"),
        (lambda: ReasoningBudget([3], opening=[-1]), "no id may be below 0"),
        (lambda: ReasoningBudget([3], -1), "limit must be at least 0, not -1"),
    ],
)
def test_what_makes_no_sense_is_said(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("constraint", "token"),
    [(AllowedTokens([1]), 2), (BadRuns([[2]]), 2), (ReasoningBudget([7], 0), 2), (AllOf(AllowedTokens([1])), 2)],
    ids=lambda value: type(value).__name__,
)
def test_a_token_that_was_not_allowed_is_not_accepted(constraint: Constraint, token: int) -> None:
    with pytest.raises(AssertionError):
        constraint.accept(token)
