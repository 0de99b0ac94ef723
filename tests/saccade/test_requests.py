"""The messages that are made of the arguments of `generate`."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import saccade
from saccade import errors
from saccade._core.requests import AllSampling, build_request, tokenize_request
from saccade._openai import anthropic_schema, response_schema
from saccade._openai.chat import chat_request
from saccade._openai.fields import MESSAGES, RESPONSE, field_named, part_rules
from saccade._openai.problems import validated
from saccade._openai.schema import ChatCompletion
from saccade.v1 import types_pb2

PNG = b"\x89PNG any bytes"


def text_of(message: types_pb2.ChatMessage) -> list[str]:
    return [part.text or f"<{part.image.data.decode()}>" for part in message.parts]


def test_a_string_goes_through_the_template_unless_raw() -> None:
    request = build_request("Hi", images=[PNG], chat_template_kwargs={"enable_thinking": False})
    assert request.WhichOneof("input") == "prompt"
    assert (request.prompt.text, request.prompt.raw) == ("Hi", False)
    assert request.prompt.images[0].data == PNG
    assert dict(request.prompt.chat_template_kwargs) == {"enable_thinking": False}
    assert build_request("Hi", raw=True).prompt.raw


def test_options_of_reasoning_need_the_chat_template() -> None:
    request = build_request("Hi", images=[PNG], enable_thinking=False, reasoning_effort="low", max_reasoning_tokens=0)
    assert request.chat.HasField("enable_thinking") and not request.chat.enable_thinking
    assert request.chat.reasoning_effort == "low" and request.sampling.HasField("max_reasoning_tokens")
    (message,) = request.chat.messages
    assert message.role == types_pb2.ROLE_USER
    assert message.parts[0].image.data == PNG and message.parts[1].text == "Hi"
    for prompt, raw in (("Hi", True), ([1, 2], False)):
        with pytest.raises(errors.InvalidArgument, match="enable_thinking: raw prompts and token ids"):
            build_request(prompt, raw=raw, enable_thinking=True)
    with pytest.raises(errors.InvalidArgument, match="reasoning_effort"):
        build_request("Hi", reasoning_effort=3)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="max_reasoning_tokens is -1"):
        build_request("Hi", max_reasoning_tokens=-1)


def test_system_messages_after_others() -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "system", "content": "Be brief."}]
    assert build_request(messages, late_system_as_user=True).chat.late_system_as_user
    assert not build_request(messages).chat.late_system_as_user
    asked = {"messages": messages, "max_tokens": 1}
    for request, same in (
        (anthropic_schema.chat_of(validated(anthropic_schema.MessagesRequest, asked))[0], True),
        (response_schema.chat_of(validated(response_schema.ResponseRequest, {"input": messages}))[0], True),
        (validated(ChatCompletion, asked), None),
        (validated(ChatCompletion, {**asked, "late_system_as_user": True}), True),
    ):
        assert request.late_system_as_user is same
        assert chat_request(request, lambda *_: None).chat.late_system_as_user is bool(same)


def test_parts_have_the_names_of_the_request_that_became_a_chat() -> None:
    """Results of tools are messages of their own in a chat, and items of one turn are one."""
    image: Any = {"type": "image", "source": {"type": "url", "url": "a"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}, image]}
    asked: dict[str, Any] = {"system": "s", "max_tokens": 1, "messages": [
        {"role": "user", "content": "?"}, {"role": "user", "content": [result, {**result, "content": "a"}, image]}
    ]}  # fmt: skip
    chat, parts = anthropic_schema.chat_of(validated(anthropic_schema.MessagesRequest, asked))
    rules = part_rules(parts, MESSAGES)
    for place in range(len(chat.messages)):
        named = [field_named(f"chat.messages[{place}].parts[{i}].image", rules) for i in range(3)]
        assert named == {
            2: ["messages[1].content[0].content[0]", "messages[1].content[0].content[1]", "messages"],
            4: ["messages[1].content[2]", "messages", "messages"],
        }.get(place, ["messages"] * 3)

    image = {"type": "input_image", "image_url": "a"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
        {"role": "assistant", "content": [image]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}, image]},
        {"role": "user", "content": [image]},
    ]
    body = validated(response_schema.ResponseRequest, {"instructions": "b", "input": items})
    chat_too, parts = response_schema.chat_of(body)
    rules = part_rules(parts, RESPONSE)
    assert [
        field_named(f"messages[{place}].content[{len(message.content) - 1}].image_url.url", rules)
        for place, message in enumerate(chat_too.messages) if isinstance(message.content, list)
    ] == ["input[2].content[0]", "input[4].output[1]", "input[5].content[0]"]  # fmt: skip
    assert field_named("messages[0].content[0]", rules) == "input", "of instructions and an item"


def test_a_message_to_continue_needs_the_chat_template() -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is"}]
    assert build_request(messages, continue_final_message=True).chat.continue_final_message
    assert tokenize_request(messages, continue_final_message=True).chat.continue_final_message
    assert tokenize_request(messages, late_system_as_user=True).chat.late_system_as_user
    assert build_request("Hi", raw=True, continue_final_message=False).WhichOneof("input") == "prompt"
    with pytest.raises(errors.InvalidArgument, match="continue_final_message: raw prompts and token ids"):
        build_request([1, 2], continue_final_message=True)
    with pytest.raises(errors.InvalidArgument, match="continue_final_message: "):
        build_request(messages, continue_final_message="yes")  # type: ignore[arg-type]


def test_reasoning_is_a_part_of_the_assistant_s_message() -> None:
    for key in ("reasoning", "reasoning_content"):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: "so"}]
        assert [message.reasoning for message in build_request(messages).chat.messages] == ["", "so"]
    for message in ({"role": "user", "content": "a", "reasoning": "so"},
                    {"role": "assistant", "content": "a", "reasoning": 3}):  # fmt: skip
        with pytest.raises(errors.InvalidArgument, match="reasoning: expected a string, in a message of the assistant"):
            build_request([message])


def test_a_message_of_openai_s_library_can_be_sent_back() -> None:
    """`model_dump` of its message has all keys."""
    call = {"id": "c", "function": {"arguments": "{}", "name": "f"}, "type": "function"}
    unset = {"refusal": None, "audio": None, "function_call": None, "annotations": [], "name": "a"}
    answers: list[dict[str, Any]] = [
        {"role": "assistant", "content": "b", "tool_calls": None, **unset},
        {"role": "assistant", "content": None, "tool_calls": [call], **unset},
    ]
    text, called = build_request([{"role": "user", "content": "a"}, *answers]).chat.messages[1:]
    assert text_of(text) == ["b"] and called.tool_calls[0].name == "f"
    with pytest.raises(errors.InvalidArgument, match="unknown keys refusal"):
        build_request([{"role": "assistant", "content": "b", "refusal": "no"}])


def test_token_ids_are_taken_as_they_are() -> None:
    request = build_request([1, 0, 70000], images=[PNG])
    assert list(request.tokens.ids) == [1, 0, 70000] and len(request.tokens.images) == 1


def test_numpy_and_torch_ids_are_integers_too() -> None:
    import numpy
    import torch

    assert list(build_request(numpy.array([3, 4])).tokens.ids) == [3, 4]  # type: ignore[arg-type]
    assert list(build_request(torch.tensor([3, 4])).tokens.ids) == [3, 4]  # type: ignore[arg-type]


def test_chat_messages_keep_the_order_of_their_parts() -> None:
    request = build_request(
        [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "before"},
                    {"type": "image", "image": b"one"},
                    "between",
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,dHdv"}},
                    {"type": "text", "text": "after"},
                ],
            },
            {"role": "assistant", "content": "ok"},
        ]
    )
    assert [message.role for message in request.chat.messages] == [1, 2, 3]
    assert text_of(request.chat.messages[1]) == ["before", "<one>", "between", "<two>", "after"]


def test_images_fill_the_places_that_the_messages_mark() -> None:
    place = {"type": "image"}
    request = build_request(
        [{"role": "user", "content": [place, "a"]}, {"role": "user", "content": ["b", place]}], images=[b"1", b"2"]
    )
    assert [text_of(message) for message in request.chat.messages] == [["<1>", "a"], ["b", "<2>"]]


def test_images_without_places_come_first_in_the_last_user_message() -> None:
    request = build_request(
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ],
        images=[b"1", b"2"],
    )
    assert [text_of(message) for message in request.chat.messages] == [["a"], ["b"], ["<1>", "<2>", "c"], ["d"]]


def test_what_is_not_given_is_not_set() -> None:
    request = build_request("?", temperature=None, max_tokens=None, stop=())
    assert request.sampling == types_pb2.SamplingParams()
    assert not request.HasField("priority")


def test_zero_is_not_the_same_as_unset() -> None:
    names = ["min_tokens", "temperature", "top_k", "min_p", "presence_penalty", "seed", "logprobs"]
    sampling = build_request("?", ignore_eos=False, **dict.fromkeys(names, 0)).sampling
    assert all(sampling.HasField(name) for name in [*names, "ignore_eos"])


def test_every_sampling_field_arrives() -> None:
    values: dict[str, Any] = {
        "max_tokens": 5, "min_tokens": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "repetition_penalty": 1.1, "presence_penalty": -0.5, "frequency_penalty": 0.5, "logit_bias": {3: -1.5},
        "seed": 2**64 - 1, "stop": ["a", "b"], "stop_token_ids": [7], "ignore_eos": True, "n": 2,
        "clamp_max_tokens": True, "skip_special_tokens": False, "logprobs": 5,
        "prompt_logprobs": 3, "allowed_token_ids": [4, 5], "bad_words": ["c"],
    }  # fmt: skip
    elsewhere = {"response_format", "max_reasoning_tokens"}
    assert values.keys() | elsewhere == {field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields}
    sampling = build_request("?", **values).sampling
    for name, value in values.items():
        got = getattr(sampling, name)
        assert (dict(got) if isinstance(value, dict) else list(got) if isinstance(value, list) else got) == value


def test_one_stop_string_is_not_its_letters() -> None:
    assert list(build_request("?", stop="END").sampling.stop) == ["END"]


def test_continued_tokens_priority_model_and_id() -> None:
    request = build_request("?", continued_token_ids=[1, 2], priority=-1, model="m", request_id="r")
    assert (list(request.continued_token_ids), request.priority) == ([1, 2], -1)
    assert (request.model, request.request_id) == ("m", "r")
    assert build_request("?").request_id != build_request("?").request_id


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param({"prompt": []}, "prompt", id="empty-list"),
        pytest.param({"prompt": 3}, "prompt", id="number"),
        pytest.param({"prompt": b"bytes"}, "prompt", id="bytes"),
        pytest.param({"prompt": ["a", "b"]}, "prompt: expected a string, .* got a list of str", id="several-prompts"),
        pytest.param({"prompt": [1, "two"]}, "prompt", id="mixed-ids"),
        pytest.param({"prompt": [-1]}, "prompt", id="negative-id"),
        pytest.param({"prompt": [1.5]}, "prompt", id="float-id"),
        pytest.param({"prompt": [2**40]}, "prompt", id="huge-id"),
        pytest.param({"prompt": [{"role": "robot", "content": ""}]}, r"messages\[0\].role", id="role"),
        pytest.param({"prompt": [{"role": "user"}]}, r"messages\[0\].content", id="no-content"),
        pytest.param({"prompt": [{"role": "user", "content": "", "x": 1}]}, "unknown keys x", id="extra-key"),
        pytest.param({"prompt": [{"role": "user", "content": [{"type": "audio"}]}]}, r"content\[0\]", id="part-type"),
        pytest.param({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text", id="no-text"),
        pytest.param(
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "images: 0 are given.* 1 p", id="few"
        ),
        pytest.param(
            {"prompt": [{"role": "system", "content": "x"}], "images": [PNG]}, "no user message", id="no-user"
        ),
        pytest.param({"prompt": [{"role": "user", "content": ""}], "raw": True}, "raw", id="raw-chat"),
        pytest.param({"prompt": [1], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", id="kwargs-with-ids"),
        pytest.param({"prompt": "", "raw": True, "chat_template_kwargs": {"a": 1}}, "chat_template", id="kwargs-raw"),
        pytest.param({"prompt": "", "chat_template_kwargs": {"a": object()}}, "chat_template_kwargs", id="kwargs-type"),
        pytest.param({"prompt": "", "seed": -1}, "seed", id="seed"),
        pytest.param({"prompt": "", "max_tokens": 1.5}, "max_tokens", id="float-count"),
        pytest.param({"prompt": "", "max_tokens": 2**31}, "max_tokens", id="count-too-big"),
        pytest.param({"prompt": "", "temperature": "hot"}, "temperature", id="temperature"),
        pytest.param({"prompt": "", "stop": [1]}, "stop", id="stop"),
        pytest.param({"prompt": "", "stop_token_ids": ["a"]}, "stop_token_ids", id="stop-ids"),
        pytest.param({"prompt": "", "logit_bias": {-1: 0.0}}, "logit_bias", id="logit-bias"),
        pytest.param({"prompt": "", "logit_bias": "0"}, "logit_bias: expected a mapping", id="logit-bias-string"),
        pytest.param({"prompt": "", "logit_bias": [(1, 0.5)]}, "logit_bias: expected a mapping", id="logit-bias-list"),
        pytest.param({"prompt": "", "continued_token_ids": [-2]}, "continued_token_ids", id="continued"),
        pytest.param({"prompt": "", "temprature": 1}, "temprature.*temperature", id="misspelt"),
        pytest.param({"prompt": "", "image": PNG}, "image; known are .*images, .*raw, .*videos", id="one-image"),
        pytest.param({"prompt": "", "videos": 3}, "videos", id="videos"),
        pytest.param({"prompt": "", "raw": "false"}, "raw: expected True or False, got 'false'", id="raw-string"),
        pytest.param({"prompt": "", "ignore_eos": "no"}, "ignore_eos: expected True or False", id="ignore-eos"),
        pytest.param({"prompt": "", "chat_template_kwargs": 5}, "chat_template_kwargs: expected a map", id="kwargs-5"),
        pytest.param({"prompt": [{"role": ["user"], "content": ""}]}, r"messages\[0\].role: expected", id="role-list"),
        pytest.param(
            {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}]},
            r"messages\[0\].content\[0\].image_url: expected a URL or a dict with the key url, got keys \['uri'\]",
            id="image-url",
        ),
        pytest.param(
            {"prompt": [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}]},
            r"messages\[0\].content\[0\].video_url: expected a URL or a dict",
            id="video-url",
        ),
        pytest.param(
            {"prompt": [{"role": "user", "content": [{"type": "video", "media_id": 5}]}]},
            r"content\[0\].media_id: expected a string, got int",
            id="media-id",
        ),
    ],
)
def test_what_is_refused_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=named):
        build_request(**arguments)


@pytest.mark.parametrize("wrong", [-1, 2**32])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_number_that_is_no_token_id_is_named(wrong: int, at: int) -> None:
    """Whatever values follow it, and with any version of protobuf."""
    ids: list[Any] = [3, True, 4]
    ids[at] = wrong
    for name in ("prompt", "stop_token_ids", "continued_token_ids"):
        with pytest.raises(
            errors.InvalidArgument, match=rf"{name}: {wrong} is not a token id; expected 0 to 4294967295"
        ):
            build_request(**{"prompt": [1], name: iter(ids)})


json_values = st.recursive(
    st.none() | st.booleans() | st.text() | st.floats() | st.integers() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    prompt=json_values,
    option=st.sampled_from([*AllSampling.__annotations__, "images", "videos", "raw", "chat_template_kwargs"]),
    value=json_values,
)
def test_anything_builds_or_is_an_invalid_argument(prompt: Any, option: str, value: Any) -> None:
    try:
        build_request(prompt, **{option: value})
    except errors.InvalidArgument as error:
        assert str(error)


def test_the_clients_have_the_same_methods() -> None:
    names = (
        "generate",
        "stream",
        "chat",
        "tokenize",
        "map",
        "run_batch",
        "models",
        "get_model",
        "with_options",
        "close",
    )
    for name in names:
        signatures = {
            tuple((p.name, p.kind, p.default) for p in inspect.signature(getattr(cls, name)).parameters.values())
            for cls in (saccade.Client, saccade.AsyncClient, saccade.LocalClient)
        }
        assert len(signatures) == 1, name
    generate, stream = (inspect.signature(getattr(saccade.Client, name)).parameters for name in ("generate", "stream"))
    patience = {"first_token_timeout", "idle_timeout", "resume"}
    assert list(generate.values()) == [p for p in stream.values() if p.name not in patience]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, f"seed is -1; it must be from 0 to {2**64 - 1}"),
        ({"seed": 2**64}, f"seed is {2**64}; it must be from 0 to {2**64 - 1}"),
        ({"max_tokens": 2**40}, f"max_tokens is {2**40}; it must be from 1 to {2**31 - 1}"),
        ({"max_tokens": "3"}, "max_tokens: expected an integer, got '3'"),
        ({"top_k": 1.5}, "top_k: expected an integer, got 1.5"),
        ({"stop": [3]}, "stop[0]: expected a string, got int"),
        ({"stop": ["a", None]}, "stop[1]: expected a string, got NoneType"),
        ({"stop": 3}, "stop: expected a string or a list of strings, got int"),
        ({"stop": b"a"}, "stop: expected a string or a list of strings, got bytes"),
        ({"bad_words": ["a", 1]}, "bad_words[1]: expected a string, got int"),
        ({"allowed_token_ids": []}, "allowed_token_ids: expected at least one token id, got none"),
    ],
)
def test_the_error_says_the_range_or_the_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        build_request("x", **options)
    assert str(refused.value) == message


HALF = "ab\ud83d"
"""The beginning of a character outside the basic plane, as programs leave it that cut UTF-16 in the middle."""


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (HALF, {}, "prompt"),
        ([{"role": "user", "content": HALF}], {}, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": HALF}]}], {}, "messages[0].content[0].text"),
        ("x", {"stop": HALF}, "stop"),
        ("x", {"bad_words": ["a", HALF]}, "bad_words[1]"),
        ("x", {"response_format": saccade.Regex(HALF)}, "response_format.pattern"),
        ("x", {"response_format": {"const": HALF}}, "response_format"),
        ("x", {"tools": [saccade.Tool("f", HALF, {})]}, "tools[0].description"),
        ("x", {"images": ["https://" + HALF]}, "images[0]"),
        ([{"role": "user", "content": [{"type": "image", "media_id": HALF}]}], {}, "messages[0].content[0].media_id"),
        ("x", {"model": HALF}, "model"),
        ("x", {"request_id": HALF}, "request_id"),
    ],
)
def test_half_a_character_is_refused_with_the_field(prompt: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="surrogate") as refused:
        build_request(prompt, **options)
    assert str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 1e300, 10**400, "5"])
@pytest.mark.parametrize("name", ["timeout", "first_token_timeout", "idle_timeout"])
def test_a_timeout_that_nothing_could_wait_for_is_refused(name: str, seconds: Any) -> None:
    with (
        saccade.Client("127.0.0.1:1") as client,
        pytest.raises(errors.InvalidArgument, match=f"^{name}: expected more than 0 and at most 1000000000 seconds"),
    ):
        client.with_options(**{name: seconds})
