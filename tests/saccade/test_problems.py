"""The error of a body that does not fit its schema: it names the expected JSON types and the actual value."""

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


HI = {"messages": [{"role": "user", "content": "x"}]}


def test_keys_whose_value_is_null_are_absent() -> None:
    part = {"type": "text", "text": "x", "more": None}
    message = {"role": "user", "content": [part], "name": None, "more": None}
    assert validated(ChatCompletion, {"messages": [message], "n": None, "more": None}) == validated(
        ChatCompletion, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}
    )
    with pytest.raises(InvalidArgument, match=r"messages\[0\].content\[0\].text: field required"):
        validated(ChatCompletion, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{}] * 9}, "messages[0].role: field required"),
        ({**HI, "stop": ["a", 1, 2]}, "stop[1]: input should be a valid string, got 1"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}, {}]}]},
         "messages[0].content[0].text: field required"),
        (HI | {f"k{i}": 1 for i in range(9)}, "k0, k1, k2, k3 and 5 more: unknown field"),
        (HI | {f"k{i}": 1 for i in range(1001)}, "1001 unknown keys or wrong values, more than 1000"),
        ({**HI, "logit_bias": dict.fromkeys(map(str, range(1001)), "1")},
         "1001 unknown keys or wrong values, more than 1000"),
    ],
)  # fmt: skip
def test_a_few_of_many_problems_are_looked_at(body: Any, message: str) -> None:
    """Each problem takes memory and time before the server knows who sends the body."""
    with pytest.raises(InvalidArgument) as refused:
        validated(ChatCompletion, body)
    assert str(refused.value) == message
