"""Fixtures of the grammars' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from grammar_walks import END, TOKENIZER, VOCABULARY

from service.engine.constraining import Constraining
from service.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def constraining() -> Iterator[Constraining]:
    made = Constraining(TOKENIZER, VOCABULARY, frozenset({END}))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER)
