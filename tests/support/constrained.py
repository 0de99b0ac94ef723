"""Small constraints over token ids for tests: state machines of the kinds that occur as grammars."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decoder.constraints import FULL, Constraint, Mask
from decoder.token_constraints import AllOf, AllowedTokens, ReasoningBudget

VOCAB, END = 97, 5
"""Vocabulary size of `tiny_decoder`'s models, and the end-of-sequence id of these machines."""


class BadRuns:
    """The output never contains one of these token sequences."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """`ValueError` for an empty sequence, or for negative ids."""
        for word in words:
            if not word or min(word) < 0:
                raise ValueError(f"a bad word has the tokens {list(word)[:5]}: at least one, and none below 0")
        self._single = frozenset(word[0] for word in words if len(word) == 1)
        self._endings: dict[int, list[tuple[int, ...]]] = {}
        """Last token of a forbidden sequence -> the tokens before it."""
        for word in words:
            if len(word) > 1:
                self._endings.setdefault(word[-1], []).append(tuple(word[:-1]))
        self._longest = max(map(len, words), default=1)
        self._tokens: list[int] = []

    def copy(self) -> BadRuns:
        made = BadRuns(())
        made._single, made._endings, made._longest = self._single, self._endings, self._longest
        made._tokens = list(self._tokens)
        return made

    def _bad(self, token: int, before: Sequence[int]) -> bool:
        if token in self._single:
            return True
        return any(tuple(before[-len(start) :]) == start for start in self._endings.get(token, ()))

    def fill_mask(self, mask: Mask) -> None:
        mask.words.fill(FULL)
        before = self._tokens[-self._longest :]
        for token in [*self._single, *(token for token in self._endings if self._bad(token, before))]:
            if token // 32 < len(mask.words):
                mask.words[token // 32] &= ~(1 << token % 32) & FULL

    def accept(self, token: int) -> None:
        assert not self._bad(token, self._tokens[-self._longest :]), f"token {token} ends a bad word"
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        assert count <= len(self._tokens)
        del self._tokens[len(self._tokens) - count :]

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        seen = self._tokens[-self._longest :]
        for place, token in enumerate(tokens):
            if self._bad(token, seen):
                return place
            seen.append(token)
        return len(tokens)

    def forced(self) -> list[int]:
        return []


@dataclass
class Machine:
    """A deterministic automaton over token ids. In the states of `accepting` the text may end, by `END`."""

    moves: Sequence[Mapping[int, int]]
    """For each state: token -> next state."""
    accepting: frozenset[int] = frozenset()
    preferred: Mapping[int, int] = field(default_factory=dict)
    """State -> the token that `forced` proposes although there are alternatives (other spellings of a forced text)."""
    path: list[int] = field(default_factory=lambda: [0])
    """The states so far."""
    fails_after: int | None = None
    """`fill_mask` raises RuntimeError once this many tokens have been accepted; None: never."""

    def copy(self) -> Machine:
        return Machine(self.moves, self.accepting, self.preferred, list(self.path), self.fails_after)

    def allowed(self, state: int) -> list[int]:
        return [*self.moves[state], *([END] if state in self.accepting else [])]

    def fill_mask(self, mask: Mask) -> None:
        if self.fails_after is not None and len(self.path) > self.fails_after:
            raise RuntimeError("the machine is out of order")
        mask.words.fill(0)
        for token in self.allowed(self.path[-1]):
            mask.words[token // 32] |= 1 << token % 32

    def accept(self, token: int) -> None:
        assert token in self.moves[self.path[-1]], f"token {token} is not allowed in state {self.path[-1]}"
        self.path.append(self.moves[self.path[-1]][token])

    def rollback(self, count: int) -> None:
        assert count < len(self.path)
        del self.path[len(self.path) - count :]

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        state = self.path[-1]
        for place, token in enumerate(tokens):
            if token == END and state in self.accepting:
                return place + 1
            if token not in self.moves[state]:
                return place
            state = self.moves[state][token]
        return len(tokens)

    def forced(self) -> list[int]:
        state, found = self.path[-1], list[int]()
        while len(found) < 12 and state not in self.accepting:
            only = next(iter(self.moves[state])) if len(self.moves[state]) == 1 else None
            token = self.preferred.get(state, only)
            if token is None:
                break
            found.append(token)
            state = self.moves[state][token]
        return found


def tokens_of(draw: random.Random, count: int) -> list[int]:
    return draw.sample([token for token in range(VOCAB) if token != END], count)


def branching(seed: int = 0, states: int = 24) -> Machine:
    """A choice in every third state, none in the others; the text may end in one of six states."""
    draw = random.Random(seed)
    moves = [
        {token: draw.randrange(states) for token in tokens_of(draw, draw.choice([2, 7, 40]) if at % 3 == 0 else 1)}
        for at in range(states)
    ]
    return Machine(moves, frozenset(range(0, states, 6)))


def spelled(seed: int = 0, length: int = 60) -> Machine:
    """One text of `length` letters. Each letter and each pair of letters has a token; the pairs are preferred."""
    draw = random.Random(seed)
    moves = []
    for at in range(length):
        one, two = tokens_of(draw, 2)
        moves.append({one: at + 1} | ({two: at + 2} if at + 2 <= length else {}))
    preferred = {at: list(moves[at])[-1] for at in range(length)}
    return Machine([*moves, {}], frozenset({length}), preferred)


def constraints(kind: str) -> Constraint:
    """A new constraint of a kind of `KINDS`."""
    return KINDS[kind]()


KINDS = {
    "branching": branching,
    "spelled": spelled,
    "chain": lambda: Machine([{10 + at: at + 1} for at in range(30)] + [{}], frozenset({30})),
    "allowed": lambda: AllowedTokens(range(0, VOCAB, 2)),
    "words": lambda: BadRuns(
        [[token] for token in range(0, VOCAB, 3)] + [[1, 2], [4, 4], *([t, 7] for t in range(50))]
    ),
    "both": lambda: AllOf(branching(3), BadRuns([[token, token] for token in range(VOCAB)])),
    "budget": lambda: ReasoningBudget([20, 21], 9, branching(1), ends=[END]),
    "opened": lambda: ReasoningBudget([20, 21, 22], 5, spelled(1), opening=[30, 31], ends=[END]),
}
"""By name: the kinds of constraint that answers are tested with."""
