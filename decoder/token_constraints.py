"""Constraints over token ids that need no grammar, and combinations of constraints."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from decoder.constraints import FULL, Constraint, Mask


class AllowedTokens:
    """Allows only these tokens, at every position. An end-of-sequence id can be drawn only if it is among them; in
    combination with a grammar, which determines where the text may end, the end-of-sequence ids must be among them."""

    def __init__(self, allowed: Collection[int]) -> None:
        """`ValueError` for an empty collection, or for negative ids."""
        if not allowed or min(allowed) < 0:
            raise ValueError(f"allowed tokens are {sorted(allowed)[:5]}; at least one is needed, and none below 0")
        self.allowed = frozenset(allowed)
        self._words: np.ndarray | None = None

    def copy(self) -> AllowedTokens:
        return self  # without state

    def fill_mask(self, mask: Mask) -> None:
        if self._words is None or self._words.shape != mask.words.shape:
            self._words = np.zeros_like(mask.words)
            _set(self._words, self.allowed)
        mask.words[:] = self._words

    def accept(self, token: int) -> None:
        assert token in self.allowed, f"token {token} was not allowed"

    def rollback(self, count: int) -> None:
        pass

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return next((place for place, token in enumerate(tokens) if token not in self.allowed), len(tokens))

    def forced(self) -> list[int]:
        return []  # with a single allowed token, the forced tokens would never end


class AllOf:
    """Allows what all of several constraints allow."""

    def __init__(self, *parts: Constraint) -> None:
        assert parts
        self._parts = parts
        self._other: Mask | None = None

    def copy(self) -> AllOf:
        return AllOf(*(part.copy() for part in self._parts))

    def fill_mask(self, mask: Mask) -> None:
        first, *rest = self._parts
        first.fill_mask(mask)
        if self._other is None or self._other.words.shape != mask.words.shape:
            self._other = Mask.over(np.empty_like(mask.words))
        for part in rest:
            part.fill_mask(self._other)
            np.bitwise_and(mask.words, self._other.words, out=mask.words)

    def accept(self, token: int) -> None:
        for part in self._parts:
            part.accept(token)

    def rollback(self, count: int) -> None:
        for part in self._parts:
            part.rollback(count)

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        return min(part.valid_prefix(tokens) for part in self._parts)

    def forced(self) -> list[int]:
        tokens = next((found for part in self._parts if (found := part.forced())), [])
        return tokens[: self.valid_prefix(tokens)]


class ReasoningBudget:
    """Free text up to a closing marker, which is forced after `limit` tokens; then what `inner` allows. Before the
    marker, only `ends` are forbidden. `inner` sees only the tokens after the marker."""

    def __init__(
        self,
        close: Sequence[int],
        limit: int | None = None,
        inner: Constraint | None = None,
        *,
        opening: Sequence[int] = (),
        ends: Collection[int] = (),
    ) -> None:
        """`close`: the marker that ends reasoning. `limit`: largest number of tokens before it, without those of
        `opening`; None: unlimited. `opening`: the marker with which the output begins if it contains reasoning; empty:
        the prompt has opened the reasoning. `ends`: tokens that may not be drawn before the closing marker, such as
        end-of-sequence ids if `inner` is a grammar.

        `ValueError` for an empty marker or a negative limit.
        """
        if not close or min((*close, *opening)) < 0:
            raise ValueError(
                f"the closing marker is {list(close)} and the opening one {list(opening)}: the closing one needs "
                "at least one token, and no id may be below 0"
            )
        if limit is not None and limit < 0:
            raise ValueError(f"limit must be at least 0, not {limit}")
        self._close, self._opening = tuple(close), tuple(opening)
        self._limit, self._inner, self._ends = limit, inner, frozenset(ends)
        self._matched = [-len(opening)]
        """The state after each token that did not go to `inner`: while the opening marker is incomplete, minus the
        number of its missing tokens; then the number of tokens of the closing marker that the text ends with."""
        self._inside = 0
        """Number of tokens passed to `inner`."""
        self._absent = False
        """Whether the output began without the opening marker, so that it contains no reasoning."""

    def copy(self) -> ReasoningBudget:
        inner = None if self._inner is None else self._inner.copy()
        made = ReasoningBudget(self._close, self._limit, inner, opening=self._opening, ends=self._ends)
        made._matched, made._inside, made._absent = list(self._matched), self._inside, self._absent
        return made

    @property
    def reasoning(self) -> bool:
        """Whether the output is still before the end of the closing marker, or its opening marker is incomplete."""
        return not self._absent and self._matched[-1] < len(self._close)

    def _must(self, matched: int, drawn: int) -> int | None:
        """The token that must follow in the part before the tokens of `inner`, or None. `drawn`: the number of tokens
        in that part."""
        if -len(self._opening) < matched < 0:
            return self._opening[matched]
        if matched >= 0 and self._limit is not None and drawn - len(self._opening) >= self._limit:
            return self._close[matched]
        return None

    def _after(self, matched: int, token: int) -> int:
        """How many tokens of the marker the text ends with after `token`."""
        if matched < 0:
            return matched + 1
        while matched and self._close[matched] != token:
            matched = self._border(matched)
        return matched + 1 if self._close[matched] == token else 0

    def _border(self, matched: int) -> int:
        """Length of the longest proper prefix of the marker that is a suffix of its first `matched` tokens."""
        seen = self._close[:matched]
        return next(size for size in range(matched - 1, -1, -1) if seen[matched - size :] == seen[:size])

    @property
    def _unopened(self) -> bool:
        return bool(self._opening) and len(self._matched) == 1 and not self._absent

    def fill_mask(self, mask: Mask) -> None:
        if self._unopened or not self.reasoning:
            if self._inner is None:
                mask.words.fill(FULL)
            else:
                self._inner.fill_mask(mask)
            if self._unopened:
                _set(mask.words, [self._opening[0]])
            return
        must = self._must(self._matched[-1], len(self._matched) - 1)
        if must is None:
            mask.words.fill(FULL)
            _clear(mask.words, self._ends)
        else:
            mask.words.fill(0)
            _set(mask.words, [must])

    def _outside(self, token: int) -> bool:
        """Whether the next token belongs to the part before the tokens of `inner`."""
        return token == self._opening[0] if self._unopened else self.reasoning

    def accept(self, token: int) -> None:
        assert self.valid_prefix([token]), f"token {token} was not allowed"
        if self._outside(token):
            self._matched.append(self._after(self._matched[-1], token))
            return
        self._absent |= self._unopened
        if self._inner is not None:
            self._inner.accept(token)
        self._inside += 1

    def rollback(self, count: int) -> None:
        inside = min(count, self._inside)
        if inside and self._inner is not None:
            self._inner.rollback(inside)
        self._inside -= inside
        self._absent &= self._inside > 0
        assert count - inside < len(self._matched)
        del self._matched[len(self._matched) - (count - inside) :]

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        if not tokens:
            return 0
        matched, place = self._matched[-1], 0
        if self._outside(tokens[0]):
            drawn = len(self._matched) - 1
            while place < len(tokens) and matched < len(self._close):
                token, must = tokens[place], self._must(matched, drawn + place)
                if token in self._ends if must is None else token != must:
                    return place
                matched, place = self._after(matched, token), place + 1
        rest = tokens[place:]
        return len(tokens) if self._inner is None or not rest else place + self._inner.valid_prefix(rest)

    def forced(self) -> list[int]:
        if self._unopened:
            return []
        matched, found = self._matched[-1], list[int]()
        while not self._absent and matched < len(self._close):
            must = self._must(matched, len(self._matched) - 1 + len(found))
            if must is None:
                return found
            found.append(must)
            matched = self._after(matched, must)
        return found if self._inner is None else [*found, *self._inner.forced()]


def _set(words: np.ndarray, tokens: Collection[int]) -> None:
    """Sets the bits of tokens; ids beyond the mask are ignored."""
    np.bitwise_or.at(words, *_bits(words, tokens))


def _clear(words: np.ndarray, tokens: Collection[int]) -> None:
    """Clears the bits of tokens."""
    places, bits = _bits(words, tokens)
    np.bitwise_and.at(words, places, ~bits)


def _bits(words: np.ndarray, tokens: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
    """(index of its word, its bit in the word) of each token; ids beyond the mask are left out."""
    ids = np.fromiter(tokens, np.int64, len(tokens))
    ids = ids[ids < 32 * words.shape[0]]
    return ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32)
