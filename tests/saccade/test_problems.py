"""What is said of a body that does not fit its schema: JSON's types, and what came instead."""

from __future__ import annotations

from typing import Any

import pytest

from saccade._openai.problems import validated
from saccade._openai.schema import ChatCompletion
from saccade.errors import InvalidArgument


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "expected an object, got a list of 0"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "got an object of type 'audio'"),
        ({"messages": [{"role": "user", "content": "x"}], "logit_bias": []}, "expected an object, got a list of 0"),
    ],
)
def test_problems_are_in_the_words_of_json(body: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        validated(ChatCompletion, body)
    assert message in str(refused.value) and "ChatCompletion" not in str(refused.value)
