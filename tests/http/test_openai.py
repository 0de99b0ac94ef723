"""OpenAI's own Python client, unmodified, against the HTTP server; gRPC's answers are the oracle."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from images import data_url, png
from running import RunningServer
from running_http import RunningHttp

import saccade

ASK: list[Any] = [{"role": "user", "content": "what is it?"}]
GREEDY: dict[str, Any] = {"model": "", "messages": ASK, "max_tokens": 12, "temperature": 0}
GRPC_NAME = re.compile(r"\b(chat|sampling|header)\.")
"""The beginning of a field's name in gRPC, which no error over HTTP uses."""


@pytest.fixture(scope="module")
def client(http: RunningHttp, server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
    http.idle()
    server.drained()


def test_a_chat_completion_is_the_answer_of_grpc(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    for seed in (1, 2):
        sampling = {"temperature": 1.0, "seed": seed, "n": 2}
        answer = client.chat.completions.create(model="", messages=ASK, max_tokens=20, **sampling)
        same = grpc_client.generate(ASK, max_tokens=20, **sampling)
        assert [c.message.content for c in answer.choices] == [s.text for s in same.samples]
        assert [c.finish_reason for c in answer.choices] == [s.finish_reason for s in same.samples]
        assert answer.usage is not None and answer.usage.prompt_tokens == same.usage.prompt_tokens
        assert answer.usage.completion_tokens == sum(s.usage.completion_tokens for s in same.samples)
        assert answer.system_fingerprint == same.model_version
        assert answer.model_extra and answer.model_extra["saccade"]["seed"] == seed


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_says_the_same_as_the_whole(client: openai.OpenAI, n: int) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "n": n, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model="", messages=ASK, max_tokens=30, **sampling)
    chunks = list(
        client.chat.completions.create(
            model="", messages=ASK, max_tokens=30, stream=True, stream_options={"include_usage": True}, **sampling
        )
    )
    texts, reasons, scores = [""] * n, [None] * n, [[] for _ in range(n)]  # type: ignore[var-annotated]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs:
                scores[choice.index] += choice.logprobs.content or []
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert scores == [c.logprobs.content for c in whole.choices if c.logprobs]
    assert chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    # Load generators take the first chunk with a choice for the first token: what is known earlier is in one without.
    assert not chunks[0].choices and chunks[0].model_extra and chunks[0].model_extra["saccade"]["prompt_tokens"] > 0
    roles = [choice.delta.role for chunk in chunks for choice in chunk.choices]
    assert roles[:n] == ["assistant"] * n and set(roles[n:]) == {None}


@pytest.mark.parametrize("fields", [{}, {"extra_body": {"stop_token_ids": list(range(100))}}], ids=["length", "stop"])
@pytest.mark.parametrize("route", ["chat", "text"])
def test_continuous_usage_is_that_of_the_choice_so_far(client: openai.OpenAI, route: str, fields: Any) -> None:
    """GuideLLM always asks for it."""
    create: Any = client.chat.completions.create if route == "chat" else client.completions.create
    prompt: Any = {"messages": ASK} if route == "chat" else {"prompt": "abcd"}
    options: dict[str, Any] = {**prompt, "model": "", "max_tokens": 12, "temperature": 1, "seed": 5, **fields}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for n in (1, 2):
        made = list(create(**options, n=n, stream=True, stream_options=usage))
        total = made[-1].usage
        ends = {}
        for chunk in made[:-1]:
            for choice in chunk.choices:
                seen = chunk.usage
                assert seen.prompt_tokens == total.prompt_tokens
                assert seen.total_tokens == seen.prompt_tokens + seen.completion_tokens
                assert seen.completion_tokens >= ends.get(choice.index, 0)
                ends[choice.index] = seen.completion_tokens
        assert len(ends) == n and sum(ends.values()) == total.completion_tokens > 0
    with pytest.raises(openai.BadRequestError, match="continuous_usage_stats: needs include_usage to be true"):
        create(**options, stream=True, stream_options={"continuous_usage_stats": True})


def test_images_and_their_tokens(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    photo = png(40)
    content: list[Any] = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": data_url(photo), "detail": "high"}},
    ]
    raw = client.chat.completions.with_raw_response.create(
        model="", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
    )
    answer = raw.parse()
    same = grpc_client.generate(
        [{"role": "user", "content": ["what is it?", {"type": "image", "image": photo}]}], max_tokens=8, temperature=0
    )
    assert answer.choices[0].message.content == same.text
    assert answer.model_extra and answer.model_extra["saccade"]["image_tokens"] == same.usage.image_tokens > 0
    assert raw.headers["x-saccade-ignored"] == "detail"


def test_names_of_participants_are_ignored(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is it?"}]
    named = [{**message, "name": "ann"} for message in messages]
    fixed: Any = {"model": "", "max_tokens": 8, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(messages=named, **fixed)
    answer, same = raw.parse(), client.chat.completions.create(messages=messages, **fixed)
    assert answer.usage and same.usage and answer.usage.prompt_tokens == same.usage.prompt_tokens
    assert answer.choices[0].message.content == same.choices[0].message.content
    assert raw.headers["x-saccade-ignored"] == "name"


def test_hints_about_caching_are_ignored(client: openai.OpenAI) -> None:
    hints: Any = {
        "prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h"
    }  # fmt: skip
    here = {"prompt_cache_breakpoint": {"mode": "explicit"}, "cache_control": {"type": "ephemeral"}}
    url = data_url(png(40))
    parts: list[Any] = [{"type": "text", "text": "x", **here}, {"type": "image_url", "image_url": {"url": url}, **here}]
    items: list[Any] = [{"type": "input_text", "text": "x", **here}, {"type": "input_image", "image_url": url, **here}]
    fixed: Any = {"model": "", "extra_body": hints}
    assert client.chat.completions.create(messages=[{"role": "user", "content": parts}], max_tokens=2, **fixed).choices
    assert client.responses.create(input=[{"role": "user", "content": items}], max_output_tokens=2, **fixed).output


def test_what_changes_no_answer_is_accepted(client: openai.OpenAI) -> None:
    """Codex sends facts about itself; both APIs have one default verbosity; there are no built-in tools whose calls
    `max_tool_calls` could limit and `include` describe."""
    facts: Any = {"client_metadata": {"x-codex-installation-id": "i"}}
    options: Any = {
        "store": False, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True, "tool_choice": "auto",
        "text": {"verbosity": "medium"}, "extra_body": facts,
    }  # fmt: skip
    assert client.responses.create(model="", input="a", max_output_tokens=2, **options).output
    options = {"include": ["web_search_call.action.sources", "file_search_call.results"], "max_tool_calls": 3}
    made = client.responses.create(model="", input="a", max_output_tokens=2, **options)
    assert made.output and made.max_tool_calls == 3
    with pytest.raises(openai.BadRequestError, match=r"include\[0\]: input should be 'message.output_text.logprobs', "):
        client.responses.create(model="", input="a", include=["nothing"])  # type: ignore[list-item]
    assert client.chat.completions.create(**{**GREEDY, "max_tokens": 2}, verbosity="medium").choices
    with pytest.raises(openai.BadRequestError, match="verbosity: input should be 'medium', got 'low'"):
        client.chat.completions.create(**GREEDY, verbosity="low")


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_defaults_of_vllm_are_accepted_spelled_out(client: openai.OpenAI, route: str) -> None:
    """And nothing else, since another value would have to change the answer."""
    create, given = client.completions.create, {"prompt": "what is it?"}
    defaults = {
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        "return_token_ids": False, "use_beam_search": False, "length_penalty": 1.0, "echo": False,
    }  # fmt: skip
    if route == "chat":
        create, given = client.chat.completions.create, {"messages": ASK}
        defaults |= {"add_special_tokens": False, "include_reasoning": True}
    fixed: Any = {"model": "", "max_tokens": 4, "temperature": 0, **given}
    answer, same = create(**fixed), create(**fixed, extra_body=defaults)
    assert same.choices[0].model_dump() == answer.choices[0].model_dump()
    with pytest.raises(openai.BadRequestError, match="include_stop_str_in_output: input should be False, got True"):
        create(**fixed, extra_body={"include_stop_str_in_output": True})


def test_token_ids(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    """As in vLLM: those of the prompt are the answer's in chat completions, and each choice's in completions."""
    asked: dict[str, Any] = {"model": "", "max_tokens": 20, "temperature": 1.0, "seed": 4, "n": 2}
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    image = {"type": "image_url", "image_url": {"url": data_url(png(1))}}
    messages: list[Any] = [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]
    same = grpc_client.chat(messages, max_tokens=20, temperature=1.0, seed=4, n=2, return_prompt_token_ids=True)
    prompt = grpc_client.tokenize(messages).token_ids
    expected = [sample.token_ids for sample in same.samples]
    assert same.prompt_token_ids == prompt and all(expected)
    with grpc_client.stream(messages, max_tokens=2, return_prompt_token_ids=True) as stream:
        assert stream.final().prompt_token_ids == prompt
    assert grpc_client.chat(messages, max_tokens=1).prompt_token_ids is None

    whole: Any = client.chat.completions.create(**asked, messages=messages, **ids)
    assert whole.prompt_token_ids == prompt and [choice.token_ids for choice in whole.choices] == expected
    joined: list[list[int]] = [[], []]
    roles = 0
    for chunk in client.chat.completions.create(**asked, messages=messages, stream=True, **ids):
        found: Any = chunk
        for choice in found.choices:
            joined[choice.index] += choice.token_ids
            if choice.delta.role:
                roles += 1
                assert found.prompt_token_ids == prompt
    assert joined == expected and roles == 2
    assert "token_ids" not in client.chat.completions.create(**asked, messages=messages).model_dump_json()

    text, more = "abcd", grpc_client.tokenize("abcd", raw=True).token_ids
    made: Any = client.completions.create(**asked, prompt=[text, text], **ids)
    assert {tuple(choice.prompt_token_ids) for choice in made.choices} == {tuple(more)}
    alone = grpc_client.generate(more, max_tokens=20, temperature=1.0, seed=4, n=2)
    assert [choice.token_ids for choice in made.choices] == [sample.token_ids for sample in alone.samples] * 2
    joined = [[], []]
    for streamed in client.completions.create(**asked, prompt=more, stream=True, **ids):
        for part in streamed.choices:
            first: Any = part
            assert joined[part.index] or first.prompt_token_ids == more
            joined[part.index] += first.token_ids
    assert joined == [sample.token_ids for sample in alone.samples]
    echo: Any = {"model": "", "prompt": text, "max_tokens": 0, "echo": True, **ids}
    scored: Any = client.completions.create(**echo).choices[0]
    assert (scored.token_ids, scored.prompt_token_ids) == ([], more)
    chunks: list[Any] = list(client.completions.create(**echo, stream=True))
    assert [chunk.choices[0].token_ids for chunk in chunks] == [[]] * len(chunks)
    assert chunks[0].choices[0].prompt_token_ids == more


def test_a_message_is_continued(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    messages: list[Any] = [*ASK, {"role": "assistant", "content": "It is"}]
    options: dict[str, Any] = {**GREEDY, "messages": messages}
    continuing = {"add_generation_prompt": False, "continue_final_message": True}
    same = grpc_client.chat(messages, max_tokens=12, temperature=0, continue_final_message=True)
    whole = client.chat.completions.create(**options, extra_body=continuing)
    fresh = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == same.text != fresh.choices[0].message.content
    assert whole.usage is not None and whole.usage.prompt_tokens == same.usage.prompt_tokens
    chunks = client.chat.completions.create(**options, extra_body=continuing, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == same.text
    counted = client.post("/../tokenize", cast_to=object, body={"messages": messages, **continuing})
    assert isinstance(counted, dict) and counted["count"] == same.usage.prompt_tokens
    for wrong, words in (
        ({"messages": ASK}, "role is user"),
        ({"response_format": {"type": "json_object"}}, "response_format describes a whole answer"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(**{**options, **wrong}, extra_body=continuing)


class Point(pydantic.BaseModel):
    x: int
    ok: bool


def test_parse_with_pydantic(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="", messages=ASK, response_format=Point, temperature=1, seed=3, max_completion_tokens=200
    )
    assert isinstance(made.choices[0].message.parsed, Point)
    plain = client.chat.completions.create(
        model="", messages=ASK, response_format={"type": "json_object"}, seed=4, max_tokens=200, temperature=1
    )
    text = plain.choices[0].message.content
    assert plain.choices[0].finish_reason == "length" or isinstance(json.loads(text or ""), dict)


def test_completions_with_echo_and_logprobs(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    same = grpc_client.generate("abcd", raw=True, max_tokens=4, temperature=0, prompt_logprobs=1, logprobs=1)
    answer = client.completions.create(model="", prompt="abcd", max_tokens=4, temperature=0, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "abcd" + same.text and choice.logprobs is not None
    assert same.prompt_logprobs is not None and same.logprobs is not None
    expected = [None if score is None else score.logprob for score in [*same.prompt_logprobs, *same.logprobs]]
    assert choice.logprobs.token_logprobs == expected
    assert choice.logprobs.tokens is not None and choice.logprobs.tokens[:4] == ["a", "b", "c", "d"]
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    ids = grpc_client.tokenize("abcd", raw=True).token_ids
    both = client.completions.create(model="", prompt=[ids, ids], max_tokens=0, temperature=0, echo=True, logprobs=1)
    assert [c.index for c in both.choices] == [0, 1] and {c.text for c in both.choices} == {"abcd"}
    assert both.choices[1].logprobs and both.choices[1].logprobs.token_logprobs == expected[:4]
    assert both.usage is not None and (both.usage.prompt_tokens, both.usage.completion_tokens) == (8, 0)


def test_tokens_are_named_by_their_ids(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    """All single bytes above 127 have the same text, so that `top_logprobs` by text has one entry for all of them."""
    same = grpc_client.generate("abcd", raw=True, max_tokens=8, temperature=0, prompt_logprobs=100, logprobs=100)
    assert same.logprobs is not None and same.prompt_logprobs is not None
    ids = [*grpc_client.tokenize("abcd", raw=True).token_ids, *same.token_ids]
    asked: Any = {"model": "", "prompt": "abcd", "max_tokens": 8, "temperature": 0, "logprobs": 100}
    by_id: Any = {"extra_body": {"return_tokens_as_token_ids": True}}
    found = client.completions.create(**asked, **by_id, echo=True).choices[0].logprobs
    plain = client.completions.create(**asked, echo=True).choices[0].logprobs
    assert found and plain and found.tokens == [f"token_id:{token_id}" for token_id in ids]
    scores = [*same.prompt_logprobs, *same.logprobs]
    tops = [None if s is None else {f"token_id:{t.token_id}": t.logprob for t in s.top} for s in scores]
    assert found.top_logprobs is not None and plain.top_logprobs is not None
    for top, expected, score in zip(found.top_logprobs, tops, scores, strict=True):
        assert score is None or top == {**(expected or {}), f"token_id:{score.token_id}": score.logprob}
    assert len(found.top_logprobs[1]) >= 100 > len(plain.top_logprobs[1])
    assert (found.token_logprobs, found.text_offset) == (plain.token_logprobs, plain.text_offset)
    chunks = client.completions.create(**asked, **by_id, stream=True)
    streamed = [t for chunk in chunks for c in chunk.choices if c.logprobs for t in c.logprobs.tokens or ()]
    assert streamed == found.tokens[4:]


def test_a_request_id_of_any_length_serves_several_prompts(client: openai.OpenAI) -> None:
    for length in (126, 127, 128):
        headers = {"x-request-id": "x" * length}
        made = client.completions.create(model="", prompt=["ab"] * 12, max_tokens=1, extra_headers=headers)
        assert made.id == f"cmpl-{'x' * length}" and len(made.choices) == 12


def test_completions_stream(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "", "prompt": "abcd", "max_tokens": 20, "seed": 3, "n": 2, "temperature": 1}
    whole = client.completions.create(**options)
    texts = ["", ""]
    for chunk in client.completions.create(**options, stream=True):
        assert chunk.system_fingerprint == whole.system_fingerprint
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("fields", [{"max_tokens": 20}, {"max_tokens": 0, "echo": True}], ids=["stopped", "echo"])
def test_the_end_of_a_streamed_completion_is_that_of_the_whole(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    """With these strings the first drawn token would end the answer."""
    drawn = client.completions.create(model="", prompt="abcd", max_tokens=1, seed=3, temperature=0).choices[0].text
    options: dict[str, Any] = {"model": "", "prompt": "abcd", "seed": 3, "temperature": 0, "stop": drawn, **fields}
    made = client.completions.create(**options)
    whole: Any = made.choices[0]
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    (last,) = [c for chunk in chunks for c in chunk.choices if c.finish_reason]
    for usage in (made.usage, chunks[-1].usage):
        assert usage is not None and usage.completion_tokens == min(fields["max_tokens"], 1)
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    expected = ("length", None) if not fields["max_tokens"] else ("stop", drawn)
    assert (whole.finish_reason, whole.stop_reason) == (last.finish_reason, last.stop_reason) == expected


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 1}, {"max_tokens": 0, "echo": True}], ids=str)
def test_streams_of_several_prompts_say_what_the_whole_answers_say(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    """Choices of prompt i begin with the index i * n. More prompts than run at a time."""
    prompts = [f"ab{i}" for i in range(20)]
    options: dict[str, Any] = {"model": "", "prompt": prompts, "seed": 3, "temperature": 1, "n": 2, "max_tokens": 5}
    options |= {**fields, "extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    found: dict[int, Any] = {}
    for chunk in chunks:
        for part in chunk.choices:
            extra: Any = part.model_extra
            choice = found.setdefault(part.index, ["", [], [], None, extra.get("prompt_token_ids")])
            choice[0] += part.text
            choice[1] += extra["token_ids"]
            choice[2] += part.logprobs.token_logprobs if part.logprobs else []
            choice[3] = part.finish_reason or choice[3]
    assert sorted(found) == list(range(40)) and chunks[-1].usage == whole.usage
    for same in whole.choices:
        extra = same.model_extra
        scores = same.logprobs.token_logprobs if same.logprobs else []
        expected = [same.text, extra["token_ids"], scores, same.finish_reason, extra["prompt_token_ids"]]
        assert found[same.index] == expected


def test_an_error_of_one_of_several_prompts_is_that_of_the_request(client: openai.OpenAI) -> None:
    """Of the first ones before the stream begins, of a later one within it."""
    bad = "x" * 5000
    for prompts in ([bad, "a"], ["a", bad]):
        with pytest.raises(openai.BadRequestError, match="context") as caught:
            client.completions.create(model="", prompt=prompts, max_tokens=2, stream=True)
        assert caught.value.param == "prompt"
    seen = []
    with pytest.raises(openai.APIError, match="context"):
        for chunk in client.completions.create(model="", prompt=["a"] * 40 + [bad], max_tokens=2, stream=True):
            seen.append(chunk)
    assert seen


def test_fields_that_openai_has_replaced(client: openai.OpenAI) -> None:
    function: Any = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    said: Any = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    for fields, name, successor in (
        ({"functions": [function]}, "functions", "tools"),
        ({"function_call": "auto"}, "function_call", "tool_choice"),
        ({"messages": [*ASK, said]}, "messages[1].function_call", "tool_calls"),
    ):  # fmt: skip
        words = f"{name}: it is not supported; OpenAI has replaced it by {successor}"
        with pytest.raises(openai.BadRequestError, match=re.escape(words)) as caught:
            client.chat.completions.create(**{**GREEDY, **fields})
        assert caught.value.param == name


def test_special_tokens_are_shown_if_they_are_asked_for(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    """The bias makes the model draw the second of them."""
    drawn: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "logit_bias": {"1": 100.0}}
    shown: Any = {"extra_body": {"skip_special_tokens": False}}
    for create, prompt in (
        (client.chat.completions.create, {"messages": ASK}), (client.completions.create, {"prompt": "abcd"})
    ):  # fmt: skip
        whole: Any = create(model="", **prompt, **drawn, **shown)
        chunks: Any = create(model="", **prompt, **drawn, **shown, stream=True)
        text = whole.choices[0].message.content if "messages" in prompt else whole.choices[0].text
        parts = [c.delta.content if "messages" in prompt else c.text for chunk in chunks for c in chunk.choices]
        assert text == "".join(part or "" for part in parts) == "<s>" * 3
        hidden: Any = create(model="", **prompt, **drawn)
        assert not (hidden.choices[0].message.content if "messages" in prompt else hidden.choices[0].text)
    told = {**drawn, "logit_bias": {1: 100.0}, "skip_special_tokens": False}
    assert grpc_client.generate(ASK, **told).text == "<s>" * 3
    assert grpc_client.generate(ASK, **{**told, "stop": "s><"}).text == "<"
    end: Any = {**drawn, "logit_bias": {"2": 100.0}}  # the end of the answer
    assert client.completions.create(model="", prompt="abcd", **end, **shown).choices[0].text == ""


def test_responses(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "", "temperature": 1, "max_output_tokens": 20, "extra_body": {"seed": 3}}
    chat = client.chat.completions.create(
        model="", messages=[{"role": "system", "content": "be brief"}, *ASK], max_tokens=20, seed=3, temperature=1
    )
    made = client.responses.create(input="what is it?", instructions="be brief", **options)
    assert made.output_text == chat.choices[0].message.content
    assert made.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    assert made.usage and chat.usage and made.usage.output_tokens == chat.usage.completion_tokens
    with client.responses.stream(input="what is it?", instructions="be brief", **options) as stream:
        events = list(stream)
    final: Any = events[-1]
    assert final.type == f"response.{made.status}" and final.response.output_text == made.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == made.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    image = {"type": "input_image", "image_url": data_url(png(40)), "detail": "high"}
    parts: list[Any] = [{"type": "input_text", "text": "x"}, image]
    raw = client.responses.with_raw_response.create(input=[{"role": "user", "content": parts}], **options)
    seen = raw.parse()
    assert raw.headers["x-saccade-ignored"] == "detail"
    assert seen.model_extra and seen.model_extra["saccade"]["image_tokens"] > 0
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(input="x", previous_response_id="resp_1", model="")


def test_input_tokens_are_those_of_the_response(client: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": data_url(png(40)), "detail": "auto"}
    content = [image, {"type": "input_text", "text": "what is it?"}]
    asked: dict[str, Any] = {
        "model": "", "instructions": "be brief", "input": [{"role": "user", "content": content}],
    }  # fmt: skip
    counted = client.responses.input_tokens.count(**asked)
    made = client.responses.create(**asked, max_output_tokens=16)
    assert made.usage and counted.input_tokens == made.usage.input_tokens and counted.object == "response.input_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(**asked, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


@pytest.mark.parametrize("fields", [
    {"ignore_eos": True, "logit_bias": {"2": 100.0}, "stop": None}, {"stop": "o"}, {"stop": ["5", "o"]},
    {"stop_token_ids": list(range(100))}, {"top_k": 3}, {"min_p": 0.2}, {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5}, {"frequency_penalty": -1.5}, {"logit_bias": {"70": 9.0}},
    {"chat_template_kwargs": {"enable_thinking": False}},
], ids=lambda fields: next(iter(fields)))  # fmt: skip
def test_responses_take_the_sampling_fields_of_chat_completions(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    """GuideLLM sends `ignore_eos` with a fixed length of answers."""
    shared: dict[str, Any] = {"model": "", "temperature": 1.5, "extra_body": {"seed": 3, **fields}}
    chat = client.chat.completions.create(messages=ASK, max_tokens=40, **shared)
    made = client.responses.create(input="what is it?", max_output_tokens=40, **shared)
    assert made.output_text == chat.choices[0].message.content
    assert made.usage and chat.usage and made.usage.output_tokens == chat.usage.completion_tokens
    plain = client.responses.create(
        model="", input="what is it?", max_output_tokens=40, temperature=1.5, extra_body={"seed": 3}
    )
    if "chat_template_kwargs" not in fields:
        assert (made.output_text, made.status) != (plain.output_text, plain.status)


def test_a_message_that_was_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "", "input": "what is it?", "max_output_tokens": 1}
    whole = client.responses.create(**options)
    events: list[Any] = list(client.responses.create(**options, stream=True))
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    for response, (message,) in ((whole, whole.output), (events[-1].response, events[-1].response.output)):
        assert (response.status, message.status) == ("incomplete", "incomplete")
    assert done.status == "incomplete"


def test_a_streamed_response_has_the_log_probabilities_of_all_tokens(client: openai.OpenAI) -> None:
    """Tokens of this model are bytes, and some of them are only a part of a character."""
    for seed in range(4):
        options: dict[str, Any] = {
            "model": "", "input": "?", "max_output_tokens": 40, "temperature": 1.0, "top_logprobs": 1,
            "include": ["message.output_text.logprobs"], "extra_body": {"seed": seed},
        }  # fmt: skip
        whole: Any = client.responses.create(**options).output[0]
        with client.responses.stream(**options) as stream:
            events: list[Any] = list(stream)
        expected = [(item.token, item.logprob) for item in whole.content[0].logprobs]
        pieces = [event for event in events if event.type == "response.output_text.delta"]
        assert [(item.token, item.logprob) for piece in pieces for item in piece.logprobs] == expected
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [(item.token, item.logprob) for item in done.logprobs] == expected
        assert events[-1].response.output[0].content[0].text == whole.content[0].text


def test_embeddings(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    made = client.embeddings.create(model="", input=["abc", "d"])
    same = [grpc_client.embed(text, raw=True).mean for text in ("abc", "d")]
    assert [item.embedding for item in made.data] == [pytest.approx(vector.tolist()) for vector in same]
    as_floats = client.embeddings.create(model="", input="abc", encoding_format="float")
    assert as_floats.data[0].embedding == pytest.approx(made.data[0].embedding)
    size = len(made.data[0].embedding)
    assert len(client.embeddings.create(model="", input="abc", dimensions=size).data[0].embedding) == size
    with pytest.raises(openai.BadRequestError, match=f"embeddings have {size} numbers, got {size - 1}") as caught:
        client.embeddings.create(model="", input="abc", dimensions=size - 1)
    assert caught.value.param == "dimensions"


def test_embeddings_of_messages(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    """As in vLLM. The prompt is that of a chat completion, with its images."""
    image = {"type": "image_url", "image_url": {"url": data_url(png(1))}}
    messages: list[Any] = [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]

    def made(**body: Any) -> Any:
        return client.post("/embeddings", cast_to=object, body=body)

    same = grpc_client.embed(messages)
    answer = made(messages=messages, pooling="last")
    assert answer["data"][0]["embedding"] == same.last.tolist()
    assert answer["usage"]["prompt_tokens"] == same.prompt_tokens > same.image_tokens > 0
    for wrong, words in (
        ({}, "expected either input or messages"), ({"input": "a", "messages": messages}, "expected either input or"),
        ({"input": "a", "enable_thinking": True}, "enable_thinking: needs messages"),
        ({"messages": messages, "add_special_tokens": True}, "add_special_tokens: expected false"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages: the prompt is too long"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError, match=words):
            made(**wrong)


def test_embeddings_with_the_truncation_that_vllms_benchmark_asks_for(client: openai.OpenAI) -> None:
    fixed: Any = {"model": "", "extra_body": {"truncate_prompt_tokens": -1}}
    assert client.embeddings.create(input="abc", **fixed).data == client.embeddings.create(model="", input="abc").data
    with pytest.raises(openai.BadRequestError, match="context"):  # nothing is cut off in silence
        client.embeddings.create(input="a" * 5000, **fixed)
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens: .*-1"):
        client.embeddings.create(model="", input="abc", extra_body={"truncate_prompt_tokens": 2})


def test_models(client: openai.OpenAI, grpc_client: saccade.Client) -> None:
    served = grpc_client.get_model()
    assert [model.id for model in client.models.list()] == [served.name]
    assert client.models.retrieve(served.name).id == served.name
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


def test_files_and_batches(client: openai.OpenAI) -> None:
    body = {"messages": ASK, "max_tokens": 5, "temperature": 0}
    rows = [{"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body} for i in range(3)]
    rows[1]["body"] = {**body, "messages": [{"role": "user", "content": "x" * 5000}]}
    uploaded = client.files.create(
        file=("in.jsonl", b"\n".join(json.dumps(row).encode() for row in rows)), purpose="batch"
    )
    assert [file.id for file in client.files.list()] == [uploaded.id]
    made = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    while (made := client.batches.retrieve(made.id)).status in ("validating", "in_progress"):
        pass
    assert made.status == "completed" and made.metadata == {"a": "b"} and made.input_file_id == uploaded.id
    assert made.request_counts and (made.request_counts.completed, made.request_counts.failed) == (2, 1)
    assert made.output_file_id and made.error_file_id
    answers = [json.loads(line) for line in client.files.content(made.output_file_id).text.splitlines()]
    direct = client.chat.completions.create(**{"model": "", **body})
    usages = [row["response"]["body"]["usage"] for row in answers]
    assert made.usage and made.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert made.usage.input_tokens_details.cached_tokens == cached
    assert {row["custom_id"] for row in answers} == {"r0", "r2"}
    for row in answers:
        assert row["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    (failed,) = [json.loads(line) for line in client.files.content(made.error_file_id).text.splitlines()]
    assert failed["custom_id"] == "r1" and failed["response"]["status_code"] == 400
    for file_id in (made.output_file_id, made.error_file_id):
        assert client.files.retrieve(file_id).bytes == len(client.files.content(file_id).content)
    assert made.id in [batch.id for batch in client.batches.list()]
    assert client.files.delete(uploaded.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(uploaded.id)
    assert client.files.delete(made.output_file_id).deleted  # deleted with the batch


def test_a_batch_whose_rows_all_failed_has_no_output(client: openai.OpenAI) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 5000}]}
    row = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body}
    uploaded = client.files.create(file=("in.jsonl", json.dumps(row).encode()), purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    while (made := client.batches.retrieve(made.id)).status in ("validating", "in_progress"):
        pass
    assert (made.status, made.output_file_id) == ("completed", None)
    assert made.error_file_id and json.loads(client.files.content(made.error_file_id).text)["custom_id"] == "r"
    assert client.files.delete(made.error_file_id).deleted and client.files.delete(uploaded.id).deleted


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"model": "nothing"}, 404, "model"),
        ({"n": 1000}, 400, "n"),
        ({"stop": ["x"] * 33}, 400, "stop"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"response_format": {"type": "choice", "choices": []}}, 400, "response_format.choice"),
        ({"temperature": -1}, 400, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]},
         400, "messages[0].content[0].image_url.url"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]}]},
         403, "messages[0].content[0]"),
        ({"max_tokens": None, "max_completion_tokens": 10**9}, 400, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 101}, 400, "top_logprobs"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
        ({"messages": [*ASK, {"role": "tool", "content": "", "tool_call_id": "1"}]}, 400, "messages[1].tool_call_id"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         400, "tools[0].function.parameters"),
        ({"response_format": {"type": "regex", "regex": "("}}, 400, "response_format.regex"),
        ({"extra_body": {"chat_template_kwargs": {"messages": 1}}}, 400, "chat_template_kwargs"),
        ({"extra_body": {"nonsense": 1}}, 400, "nonsense"),
        ({"logit_bias": {"5": "1"}}, 400, "logit_bias.5"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "schemas": {}}}},
         400, "response_format.json_schema"),
    ],
)  # fmt: skip
def test_errors_name_the_field(client: openai.OpenAI, changes: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{**GREEDY, **changes})
    error = caught.value
    assert error.status_code == status and error.code and error.request_id
    assert error.param == param and not GRPC_NAME.search(error.message)
    assert isinstance(error.body, dict) and error.body["request_id"] == error.request_id
    if param.endswith(".url"):
        assert "expected a data URL, media:ID or an https URL, got '/etc/passwd'" in error.message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"), ("completions", {"prompt": [10**6]}, "prompt"),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 101}, "logprobs"),
        ("completions", {"prompt": "a", "stream": True, "stop_token_ids": [10**6]}, "stop_token_ids"),
        ("embeddings", {"input": [10**6]}, "input"), ("embeddings", {"input": ["a", 1]}, "input[1]"),
        ("responses", {"input": "x" * 5000}, "input"), ("responses", {"input": "a", "max_output_tokens": 10**6},
                                                        "max_output_tokens"),
        ("responses", {"input": "a", "reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("responses", {"input": "a", "top_logprobs": 101}, "top_logprobs"),
        ("responses", {"input": "a", "stream": True, "stream_options": {"nonsense": 1}}, "stream_options"),
        ("responses", {"input": "a", "stream_options": {}}, "stream_options"),
        ("completions", {"prompt": [[1, 2], [3, -1]]}, "prompt[1][1]"),
        ("responses", {"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ("responses", {"instructions": "i", "input": [{"role": "user", "content": "a"}, {"role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]},
         "input[1].content[1]"),
        ("responses/input_tokens", {"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "/etc/passwd"}]}]}, "input[0].content[0]"),
        ("../tokenize", {"prompt": "a" * 100_000}, "prompt"), ("../detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
        ("../tokenize", {"messages": [{"role": "user", "content": "a" * 100_000}]}, "messages"),
    ],
)  # fmt: skip
def test_errors_name_the_field_of_any_request(
    client: openai.OpenAI, path: str, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post(f"/{path}", cast_to=object, body=body)
    assert caught.value.param == param and not GRPC_NAME.search(caught.value.message)
    assert isinstance(caught.value.body, dict) and caught.value.body["request_id"] == caught.value.request_id
    noted = re.search(r"\[(\w+)\]$", caught.value.message)
    assert noted is None or noted[1] == param
    if param == "max_output_tokens":
        assert "max_output_tokens 1000000 and a prompt of" in caught.value.message


def test_an_error_tells_clients_that_refer_to_items_what_they_need(client: openai.OpenAI) -> None:
    """The AI SDK sends ids of items unless it is told that they are not stored."""
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]: .*store=false.* got an object of type 'item_refe"):
        client.responses.create(model="", input=[{"type": "item_reference", "id": "msg_1"}])


def test_an_error_about_a_part_of_a_response_names_those_with_images_too(client: openai.OpenAI) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match=r"content\[0\]: expected a part of type input_image, "):
        client.responses.create(model="", input=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize("name", ["chat.v2", "org/chat.v2", "my-chat.v2"])
def test_a_model_s_name_is_no_field(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'{re.escape(name)}'"):
        client.chat.completions.create(**{**GREEDY, "model": name})


@pytest.mark.parametrize("count", [700, 50_000], ids=["tokens", "characters"])
def test_frameworks_know_the_words_about_a_prompt_that_is_too_long(client: openai.OpenAI, count: int) -> None:
    """LangChain, LiteLLM and coding agents look for Anthropic's words, Pydantic AI for vLLM's; then they shorten the
    conversation."""
    text = "7 " * count
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    for path, body, name in (
        ("chat/completions", asked, "messages"),
        ("messages", asked, "messages"),
        ("responses", {"input": text}, "input"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.post(f"/{path}", cast_to=object, body=body)
        told = (
            rf"{name}: the prompt is too long: \d+ (tokens|characters)[,;] .*the maximum context length (is|of) 600\b"
        )
        assert re.search(told, caught.value.message)


def test_too_many_images_are_counted_in_words(client: openai.OpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(png(40))}}
    with pytest.raises(openai.BadRequestError, match="images is 100; it must be") as caught:
        client.chat.completions.create(**{**GREEDY, "messages": [{"role": "user", "content": [part] * 100}]})
    assert caught.value.param == "messages"


def test_what_is_not_supported_is_an_error_that_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id: it is not supported, got 'resp_1'"):
        client.responses.create(model="", input="a", previous_response_id="resp_1")


def test_errors_name_the_field_of_a_batch(client: openai.OpenAI) -> None:
    uploaded = client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h",
            metadata={str(i): "" for i in range(17)},
        )  # fmt: skip
    assert caught.value.param == "metadata"
    client.files.delete(uploaded.id)


def test_a_deadline_and_a_vanished_client_end_the_work(
    client: openai.OpenAI, http: RunningHttp, server: RunningServer
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**{**GREEDY, "max_tokens": 500}, extra_headers={"x-request-timeout": "0.001"})
    assert caught.value.status_code == 504
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(
            **{**GREEDY, "max_tokens": 550, "n": 8}, extra_body={"ignore_eos": True}, timeout=0.05
        )
    stream = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 500}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    endless: Any = {"max_tokens": 500, "extra_body": {"ignore_eos": True}}
    several = client.completions.create(model="", prompt=["a"] * 20, stream=True, **endless)
    next(iter(several))
    several.close()
    http.idle()
    assert server.drained()["decoder"]["used_slots"] == 0


def test_many_asynchronous_streams(http: RunningHttp, client: openai.OpenAI) -> None:
    expected = client.chat.completions.create(**GREEDY).choices[0].message.content

    async def one(session: openai.AsyncOpenAI) -> str:
        text = ""
        async for chunk in await session.chat.completions.create(**GREEDY, stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as session:
            return await asyncio.gather(*(one(session) for _ in range(24)))

    assert asyncio.run(run()) == [expected] * 24


def test_the_asynchronous_client(http: RunningHttp, server: RunningServer, client: openai.OpenAI) -> None:
    """Each kind of call, an error, timeouts, and answers that their reader leaves, whole and streamed."""
    endless: dict[str, Any] = {**GREEDY, "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    prompt: dict[str, Any] = {"model": "", "prompt": "abcd", "temperature": 0, "max_tokens": 500}
    same = client.chat.completions.create(**GREEDY).choices[0].message.content
    vector = client.embeddings.create(model="", input="abc").data[0].embedding

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as session:
            assert (await session.chat.completions.create(**GREEDY)).choices[0].message.content == same
            assert (await session.embeddings.create(model="", input="abc")).data[0].embedding == vector
            assert [model.id async for model in session.models.list()]
            made = await session.responses.create(model="", input="what is it?", max_output_tokens=12, temperature=0)
            assert made.output_text == same
            with pytest.raises(openai.BadRequestError):
                await session.chat.completions.create(**{**GREEDY, "max_tokens": 0})
            with pytest.raises(openai.APITimeoutError):
                await session.chat.completions.create(**{**endless, "n": 8}, timeout=0.05)
            whole = asyncio.ensure_future(session.chat.completions.create(**{**endless, "n": 8}))
            while not (http.front.running or whole.done()):
                await asyncio.sleep(0.005)
            whole.cancel()
            streams: list[Any] = [
                await session.chat.completions.create(**endless, stream=True),
                await session.completions.create(**prompt, stream=True, extra_body={"ignore_eos": True}),
                await session.responses.create(model="", input="what is it?", max_output_tokens=500, stream=True),
            ]
            for stream in streams:
                await anext(aiter(stream))
                await stream.close()

    asyncio.run(run())
    http.idle()
    assert server.drained()["decoder"]["used_slots"] == 0
