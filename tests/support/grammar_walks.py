"""Random texts under a constraint, with the vocabulary of the embedded model."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from decoder.constraints import Mask

TOKENIZER = Path(__file__).resolve().parents[2] / "demo" / "model" / "tokenizer.json"
VOCABULARY, END = 1024, 4


def allowed(constraint: Any) -> set[int]:
    words = np.full(VOCABULARY // 32, 0xFFFFFFFF, np.uint32)
    constraint.fill_mask(Mask.over(words))
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def walk(
    constraint: Any, rng: random.Random, most: int = 300, end: float = 0.3, prefer: Collection[int] = ()
) -> list[int]:
    """Random tokens until the end of the text, which is chosen with probability `end` where it is allowed; half of the
    tokens are of `prefer` where these are allowed."""
    drawn: list[int] = []
    while len(drawn) < most:
        choices = allowed(constraint)
        preferred = sorted(choices & {*prefer}) if prefer and rng.random() < 0.5 else []
        token = END if END in choices and rng.random() < end else rng.choice(preferred or sorted(choices))
        constraint.accept(token)
        drawn.append(token)
        if token == END:
            break
    return drawn
