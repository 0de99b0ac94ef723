"""Masks of bad words, compared with a search through the text."""

from __future__ import annotations

import random

import numpy as np
import pytest

from decoder.constraints import Mask
from service.engine.bad_words import BadWords, TokenText


def allowed(made: BadWords, vocabulary: int) -> list[bool]:
    words = np.zeros(-(-vocabulary // 32), np.uint32)
    made.fill_mask(Mask.over(words))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[vocabulary:].any(), "bits beyond the vocabulary"
    return bits[:vocabulary].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_a_token_is_banned_where_it_completes_a_word(seed: int) -> None:
    rng = random.Random(seed)

    def text(most: int, least: int = 0) -> str:
        return "".join(rng.choice("abc") for _ in range(rng.randint(least, most)))

    words = [text(5, 2) for _ in range(rng.randint(1, 4))]
    tokens = [text(6) for _ in range(rng.choice((1, 40, 64)))] + ["a", "b", "c", "é"]
    made, before = BadWords(TokenText([token.encode() for token in tokens]), words), ""
    for _ in range(60):
        completed = [any(word in (before + token)[max(0, len(before) - len(word) + 1) :] for word in words)
                     for token in tokens]  # fmt: skip
        found = allowed(made, len(tokens))
        assert found == [not each for each in completed], (words, before)
        if not (free := [index for index, bit in enumerate(found) if bit]):
            break
        token = rng.choice(free)
        made.accept(token)
        before += tokens[token]


def test_no_token_has_text() -> None:
    assert allowed(BadWords(TokenText([b"", b"", b""]), ["a"]), 3) == [True] * 3


def test_a_new_state_takes_the_tokens_that_it_changes() -> None:
    """With a vocabulary of 150,000 tokens it would otherwise take as long as several steps."""
    tokens = [bytes([first, second]) for first in range(97, 123) for second in range(97, 123)]
    text, asked = TokenText(tokens), list[int]()

    class Counting(TokenText):
        def banned(self, *given: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
            found = text.banned(*given)  # type: ignore[arg-type]
            asked.append(len(found[0]))
            return found

    made = BadWords(Counting(tokens), ["xyz", "yy"])
    made.accept(tokens.index(b"ax"))
    banned = {token for token, bit in zip(tokens, allowed(made, len(tokens)), strict=True) if not bit}
    assert banned == {b"yz", b"yy"}
    assert asked == [26 * 26, 26]
