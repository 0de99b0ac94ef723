"""A constraint that forbids strings in an answer, however they are tokenised.

All strings form one automaton over bytes (Aho and Corasick, 1975). In each state, a token is forbidden if its bytes
reach the end of a string. The forbidden tokens of the first state are computed for the whole vocabulary at once; those
of another one, when it is first reached, for the tokens whose first byte leads to another state than from the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from decoder.constraints import Mask

_MAX_MASKS = 64
"""Maximum number of cached masks, each with one bit per token. Most tokens of an answer visit few states."""


class TokenText:
    """The bytes of a vocabulary's tokens, arranged for automaton steps of all tokens at once."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """`tokens`: the bytes of each token, by id; empty for tokens that are not text."""
        self.tokens = tokens
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._order = np.argsort(-lengths, kind="stable")
        """Token ids, longest tokens first."""
        flat = np.frombuffer(b"".join(tokens), np.uint8)
        starts = np.cumsum(lengths) - lengths
        ordered = lengths[self._order]
        self._columns = [
            flat[starts[self._order[: np.count_nonzero(ordered > place)]] + place]
            for place in range(int(lengths.max(initial=0)))
        ]
        """For each byte position, the bytes of all tokens that are long enough, in that order."""

    def banned(
        self, steps: np.ndarray, ending: np.ndarray, state: int, first: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids of the tokens whose first byte is one of `first`, bool: whether the bytes of each lead from `state`
        through a state that is `ending`). `steps`: transition table, int32 `[states, 256]`; `first`: bool `[256]`."""
        places = np.flatnonzero(first[self._columns[0]]) if self._columns else np.empty(0, np.int64)
        states = np.full(len(places), state, np.int32)
        found = np.zeros(len(places), bool)
        for column in self._columns:
            count = int(np.searchsorted(places, len(column)))
            states = steps[states[:count], column[places[:count]]]
            found[:count] |= ending[states]
        return self._order[places], found


class _Automaton:
    """The automaton of one request, with the masks of the states that its samples have visited."""

    def __init__(self, text: TokenText, words: Sequence[bytes]) -> None:
        self._text = text
        following: list[dict[int, int]] = [{}]
        ending = [False]
        for word in words:
            state = 0
            for byte in word:
                if byte not in following[state]:
                    following[state][byte] = len(following)
                    following.append({})
                    ending.append(False)
                state = following[state][byte]
            ending[state] = True
        self.steps = np.zeros((len(following), 256), np.int32)
        fallback = [0] * len(following)
        queue = [0]
        for state in queue:
            self.steps[state] = self.steps[fallback[state]] if state else 0
            ending[state] |= ending[fallback[state]]
            for byte, target in following[state].items():
                fallback[target] = int(self.steps[fallback[state], byte]) if state else 0
                self.steps[state, byte] = target
                queue.append(target)
        self.ending = np.array(ending)
        self._allowed = np.zeros(-(-len(text.tokens) // 32) * 32, bool)
        """Which tokens are allowed in the first state."""
        self._allowed[: len(text.tokens)] = True
        ids, banned = text.banned(self.steps, self.ending, 0, np.ones(256, bool))
        self._allowed[ids[banned]] = False
        self._masks: OrderedDict[int, np.ndarray] = OrderedDict()

    def mask(self, state: int) -> np.ndarray:
        """Bits of the tokens that are allowed in a state: uint32 `[ceil(vocabulary / 32)]`."""
        if state not in self._masks:
            # After a first byte that leads to the same state as from the first one, so do all further ones.
            ids, banned = self._text.banned(self.steps, self.ending, state, self.steps[state] != self.steps[0])
            allowed = self._allowed.copy()
            allowed[ids] = ~banned
            self._masks[state] = np.packbits(allowed, bitorder="little").view(np.uint32)
            if len(self._masks) > _MAX_MASKS:
                self._masks.popitem(last=False)
        self._masks.move_to_end(state)
        return self._masks[state]

    def after(self, state: int, token: int) -> int | None:
        """The state after a token; None if the token is forbidden."""
        for byte in self._text.tokens[token]:
            state = int(self.steps[state, byte])
            if self.ending[state]:
                return None
        return state


class BadWords:
    """A `decoder.constraints.Constraint`: the output's text contains none of some strings."""

    def __init__(self, text: TokenText, words: Sequence[str]) -> None:
        """`words`: non-empty strings."""
        self._automaton = _Automaton(text, [word.encode() for word in words])
        self._states = [0]

    def copy(self) -> BadWords:
        made = BadWords.__new__(BadWords)
        made._automaton, made._states = self._automaton, list(self._states)
        return made

    def fill_mask(self, mask: Mask) -> None:
        mask.words[:] = self._automaton.mask(self._states[-1])

    def accept(self, token: int) -> None:
        state = self._automaton.after(self._states[-1], token)
        assert state is not None, f"token {token} ends a bad word"
        self._states.append(state)

    def rollback(self, count: int) -> None:
        assert count < len(self._states)
        del self._states[len(self._states) - count :]

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        state = self._states[-1]
        for place, token in enumerate(tokens):
            following = self._automaton.after(state, token)
            if following is None:
                return place
            state = following
        return len(tokens)

    def forced(self) -> list[int]:
        return []
