"""Reasoning over HTTP, with OpenAI's and Anthropic's own clients: separate from the answer, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from reasoner import make_reasoner
from running import RunningServer
from running_http import RunningHttp

import saccade

ASK: list[Any] = [{"role": "user", "content": "?"}]
BUDGET = 5
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
CHAT: dict[str, Any] = {
    "model": "", "messages": ASK, "max_tokens": 24, **SAMPLED, "extra_body": {"max_reasoning_tokens": BUDGET},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model: Path = make_reasoner(tmp_path_factory.mktemp("reasoner") / "tiny")
    with RunningServer(str(model), max_seqs=4, max_len=300) as running:
        yield running


@pytest.fixture(scope="module")
def client(http: RunningHttp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def expected(grpc_client: saccade.Client) -> saccade.Sample:
    """The answer over gRPC, which has both parts."""
    answer = grpc_client.generate(ASK, max_tokens=24, max_reasoning_tokens=BUDGET, **SAMPLED)
    assert answer.reasoning and answer.text and answer.usage.reasoning_tokens <= BUDGET
    return answer.samples[0]


def test_chat_completions(client: openai.OpenAI, expected: saccade.Sample) -> None:
    whole = client.chat.completions.create(**CHAT)
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == (expected.reasoning, expected.text)
    assert message.reasoning == expected.reasoning
    assert whole.usage and whole.usage.completion_tokens_details
    assert whole.usage.completion_tokens_details.reasoning_tokens == expected.usage.reasoning_tokens
    thoughts = text = order = ""
    for chunk in client.chat.completions.create(**CHAT, stream=True):
        delta: Any = chunk.choices[0].delta
        if thought := getattr(delta, "reasoning_content", None):
            thoughts += thought
            order += "1"
        if delta.content:
            text += delta.content
            order += "2"
    assert (thoughts, text) == (expected.reasoning, expected.text)
    assert "21" not in order, "reasoning comes before the text"


def test_reasoning_that_was_cut_off_is_continued(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    letters = grpc_client.tokenize("abcdefgh", raw=True).token_ids
    bias: dict[int, float] = dict.fromkeys(letters, 100.0)
    whole = grpc_client.generate(ASK, max_tokens=24, max_reasoning_tokens=BUDGET, temperature=0, logit_bias=bias)
    assert len(whole.reasoning) == BUDGET and len(whole.text) == 24 - BUDGET - 1

    def rest(said: str, most: int, **fields: Any) -> Any:
        messages = [*ASK, {"role": "assistant", "content": said}]
        made = client.chat.completions.create(
            model="", messages=messages, max_tokens=most, temperature=0,  # type: ignore[arg-type]
            logit_bias={str(token): 100 for token in letters}, extra_body={**fields, "continue_final_message": True},
        )  # fmt: skip
        return made.choices[0].message

    inside = rest(f"<think>{whole.reasoning[:2]}", 22, max_reasoning_tokens=BUDGET - 2)
    assert (inside.reasoning_content, inside.content) == (whole.reasoning[2:], whole.text)
    after = rest(f"<think>{whole.reasoning}</think>{whole.text[:4]}", 24 - BUDGET - 1 - 4)
    assert after.content == whole.text[4:] and not hasattr(after, "reasoning_content")


def test_a_request_without_reasoning(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    asked = {**CHAT, "extra_body": {"enable_thinking": False}}
    same = grpc_client.generate(ASK, max_tokens=24, enable_thinking=False, **SAMPLED)
    message: Any = client.chat.completions.create(**asked).choices[0].message
    assert message.content == same.text and not hasattr(message, "reasoning_content")


def test_responses(client: openai.OpenAI, expected: saccade.Sample) -> None:
    options: dict[str, Any] = {
        "model": "", "input": "?", "max_output_tokens": 24, "temperature": 1.0,
        "extra_body": {"seed": 7, "max_reasoning_tokens": BUDGET},
    }  # fmt: skip
    made = client.responses.create(**options)
    kinds = [item.type for item in made.output]
    thought: Any = made.output[0]
    assert kinds == ["reasoning", "message"] and made.output_text == expected.text
    assert [part.text for part in thought.content] == [expected.reasoning]
    assert made.usage and made.usage.output_tokens_details.reasoning_tokens == expected.usage.reasoning_tokens
    with client.responses.stream(**options) as stream:
        events: list[Any] = list(stream)
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == expected.reasoning
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected.text
    final = events[-1].response
    assert [item.type for item in final.output] == kinds and final.output[0].content[0].text == expected.reasoning
    # The next turn accepts the items unchanged; this template does not include the reasoning of earlier turns.
    again = client.responses.create(**{**options, "input": [*(item.model_dump() for item in final.output), *ASK]})
    assert again.usage and made.usage and again.usage.input_tokens > made.usage.input_tokens


def test_a_response_of_reasoning_alone_has_an_empty_message_in_both_forms(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "", "input": "?", "max_output_tokens": 3, "extra_body": {"seed": 7}}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        streamed = [event.response for event in stream if event.type == "response.incomplete"]
    for made in (whole, *streamed):
        assert [item.type for item in made.output] == ["reasoning", "message"] and made.output_text == ""
    assert len(streamed) == 1


@pytest.mark.parametrize("most", [3, 24], ids=["reasoning-alone", "both"])
def test_responses_have_the_log_probabilities_of_all_tokens_in_both_forms(client: openai.OpenAI, most: int) -> None:
    options: dict[str, Any] = {
        "model": "", "input": "?", "max_output_tokens": most, "temperature": 1.0, "top_logprobs": 1,
        "include": ["message.output_text.logprobs"], "extra_body": {"seed": 7, "max_reasoning_tokens": BUDGET},
    }  # fmt: skip
    whole: Any = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events: list[Any] = list(stream)
    scores = [item.content[0].logprobs for made in (whole, events[-1].response) for item in made.output[1:]]
    assert scores[0] == scores[1] and len(scores[0]) == whole.usage.output_tokens
    deltas = [score for event in events if event.type == "response.output_text.delta" for score in event.logprobs]
    assert [score.logprob for score in deltas] == [score.logprob for score in scores[0]]


def test_messages_have_thinking_blocks(http: RunningHttp, expected: saccade.Sample) -> None:
    with anthropic.Anthropic(base_url=http.url, api_key="none", max_retries=0, timeout=60) as client:
        options: dict[str, Any] = {
            "model": "", "max_tokens": 24, "messages": ASK, "thinking": {"type": "enabled", "budget_tokens": BUDGET},
            "extra_body": SAMPLED,
        }  # fmt: skip
        made: list[Any] = client.messages.create(**options).content
        assert [block.type for block in made] == ["thinking", "text"]
        assert (made[0].thinking, made[1].text) == (expected.reasoning, expected.text)
        with client.messages.stream(**options) as stream:
            deltas: list[Any] = [event.delta for event in stream if event.type == "content_block_delta"]
            final = stream.get_final_message()
        assert "".join(d.thinking for d in deltas if d.type == "thinking_delta") == expected.reasoning
        signatures = [i for i, d in enumerate(deltas) if d.type == "signature_delta"]  # the AI SDK waits for it
        assert signatures == [sum(d.type == "thinking_delta" for d in deltas)]
        assert "".join(d.text for d in deltas if d.type == "text_delta") == expected.text
        assert [block.type for block in final.content] == ["thinking", "text"]
        thinking = {**options["thinking"], "display": "omitted"}
        hidden: list[Any] = client.messages.create(**{**options, "thinking": thinking}).content
        with client.messages.stream(**{**options, "thinking": thinking}) as stream:
            assert not [event for event in stream if event.type == "thinking"]
            same: list[Any] = stream.get_final_message().content
        for blocks in (hidden, same):
            assert [block.type for block in blocks] == ["thinking", "text"]
            assert (blocks[0].thinking, blocks[1].text) == ("", expected.text)
        plain = client.messages.create(**{**options, "thinking": {"type": "disabled"}})
        assert [block.type for block in plain.content] == ["text"]
