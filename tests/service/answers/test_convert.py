"""Conversion of messages to requests: allowed values of every field, from both sides of its limits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format

from families.nemotron_h_omni.prompt import frame_labels
from saccade._core.requests import build_request
from saccade.v1 import inference_pb2, types_pb2
from service.answers import convert
from service.common import errors
from service.common.types import (
    ChatInput,
    Delta,
    Finished,
    Image,
    MediaLayout,
    RawInput,
    Started,
    Tokenized,
    TokensInput,
    Usage,
    Video,
)  # fmt: skip


def prompt(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=inference_pb2.PromptInput(text="a", **fields))


def refused(request: inference_pb2.GenerateRequest, field: str, words: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=words) as error:
        convert.spec_from_proto(request)
    assert error.value.field == field


def of_frames(**fields: Any) -> inference_pb2.GenerateRequest:
    request = prompt()
    request.prompt.videos.add().frames.CopyFrom(
        types_pb2.VideoFrames(images=[types_pb2.Image(data=b"a"), types_pb2.Image(media_id="b")], **fields)
    )
    return request


@pytest.mark.parametrize("fps", [0.0, -1.0, 1e-310, 5e-324, 9e-7, 1000.1, 1e300, float("inf"), float("nan")])
def test_frames_a_second_that_no_clip_has(fps: float) -> None:
    refused(of_frames(fps=fps), "prompt.videos[0].frames.fps", "fps is .*; it must be from 1e-06 to 1000")


@pytest.mark.parametrize("fps", [1e-6, 0.04, 1000.0])
def test_frames_a_second_that_a_clip_may_have(fps: float) -> None:
    (video,) = convert.spec_from_proto(of_frames(fps=fps)).media
    assert isinstance(video, Video) and video.fps == fps
    assert all(
        "seconds" in label and "inf" not in label for label in frame_labels(4, 2, fps=fps, indices=[0, 9, 20, 99])
    )


def test_frames_keep_their_order_and_where_they_are() -> None:
    (video,) = convert.spec_from_proto(of_frames()).media
    assert isinstance(video, Video) and video.fps is None and video.max_frames is None and video.elsewhere
    here, there = video.frames
    assert (here.data, here.elsewhere, here.field) == (b"a", False, "prompt.videos[0].frames.images[0]")
    assert (there.media_id, there.elsewhere, there.field) == ("b", True, "prompt.videos[0].frames.images[1]")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message"])
@pytest.mark.parametrize("form", ["chat", "prompt"])
def test_what_a_template_is_told_by_this_server_is_not_the_client_s_to_say(name: str, form: str) -> None:
    """Without the generation prompt, a model would continue the user's text."""
    request = inference_pb2.GenerateRequest()
    if form == "chat":
        request.chat.messages.add(role=types_pb2.ROLE_USER).parts.add(text="a")
        arguments = request.chat.chat_template_kwargs
    else:
        request.prompt.text = "a"
        arguments = request.prompt.chat_template_kwargs
    json_format.ParseDict({"enable_thinking": True, "budget": 3, "depth": 0.5}, arguments)
    spec = convert.spec_from_proto(request)
    assert isinstance(spec.input, ChatInput)
    assert spec.input.template_arguments == {"enable_thinking": True, "budget": 3, "depth": 0.5}
    assert isinstance(spec.input.template_arguments["budget"], int)
    json_format.ParseDict({name: False}, arguments)
    refused(request, "chat_template_kwargs", f"may not set {name}")


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_arguments_of_a_template_are_json(number: float) -> None:
    request = prompt()
    request.prompt.chat_template_kwargs.fields["budget"].number_value = number
    refused(request, "chat_template_kwargs", "chat_template_kwargs cannot be read as JSON: .*(Infinity|NaN)")


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"zeta": {"type": "integer", "minimum": 1, "maximum": 9}, "alpha": {"enum": ["b", "a", 1.5]}},
            "required": ["zeta"],
        },
    },
}


@pytest.mark.parametrize("prompt", ["Hi", [{"role": "user", "content": "Hi"}]], ids=["text", "messages"])
def test_definitions_of_tools_arrive_as_they_were_written(prompt: Any) -> None:
    """A template prints them: the order of their keys, and that 1 is not 1.0, are part of the prompt."""
    arguments = {"tools": [TOOL], "enable_thinking": False}
    sent = build_request(prompt, chat_template_kwargs=arguments).SerializeToString()
    spec = convert.spec_from_proto(inference_pb2.GenerateRequest.FromString(sent))
    assert isinstance(spec.input, ChatInput)
    assert json.dumps(spec.input.template_arguments) == json.dumps(arguments)
    older = inference_pb2.GenerateRequest.FromString(sent)
    getattr(older, older.WhichOneof("input") or "").ClearField("chat_template_kwargs_json")
    spec = convert.spec_from_proto(older)  # as servers that do not know the field read it, except for numbers
    assert isinstance(spec.input, ChatInput) and spec.input.template_arguments == arguments
    assert "1.0" not in json.dumps(spec.input.template_arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must be a JSON object, not a list"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": ' + "[" * 100_000, "nested 100001 deep; at most 100 are allowed"),
        ('{"a": ' + "1" * 10_000 + "}", "is not valid JSON"),
        (" " * 262_145, "has 262145 characters; it must have from 1 to 262144"),
    ],
    ids=["broken", "list", "nan", "deep", "number", "long"],
)
def test_json_that_is_no_object_of_arguments_is_refused(text: str, words: str) -> None:
    request = prompt()
    request.prompt.chat_template_kwargs_json = text
    refused(request, "chat_template_kwargs_json", words)


def test_json_may_not_set_what_the_server_sets_either() -> None:
    request = prompt()
    request.prompt.chat_template_kwargs_json = '{"messages": []}'
    refused(request, "chat_template_kwargs", "may not set messages")


def test_raw_text_passes_no_template() -> None:
    assert convert.spec_from_proto(prompt(raw=True)).input == RawInput("a")
    assert convert.spec_from_proto(prompt(raw=True, add_special_tokens=True)).input == RawInput("a", True)
    refused(prompt(add_special_tokens=True), "prompt.add_special_tokens", "needs prompt.raw")
    request = prompt(raw=True)
    json_format.ParseDict({"x": 1}, request.prompt.chat_template_kwargs)
    refused(request, "prompt.chat_template_kwargs", "cannot be used with raw text")
    request = prompt(raw=True)
    request.prompt.chat_template_kwargs_json = "{}"
    refused(request, "prompt.chat_template_kwargs", "cannot be used with raw text")


def test_a_request_s_own_name() -> None:
    assert convert.spec_from_proto(prompt()).request_id != convert.spec_from_proto(prompt()).request_id
    request = prompt()
    request.request_id = "x" * 128
    assert convert.spec_from_proto(request).request_id == "x" * 128
    request.request_id += "x"
    refused(request, "request_id", "has 129 characters; at most 128")


def test_images_come_before_videos_and_both_before_the_words() -> None:
    request = prompt(videos=[types_pb2.Video(data=b"v")], images=[types_pb2.Image(data=b"i")])
    spec = convert.spec_from_proto(request)
    assert [type(source) for source in spec.media] == [Image, Video]
    assert isinstance(spec.input, ChatInput) and spec.input.messages[0].parts == (None, None, "a")
    tokens = inference_pb2.GenerateRequest(tokens=inference_pb2.TokensInput(ids=[1, 2]))
    assert convert.spec_from_proto(tokens).input == TokensInput((1, 2))


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"),
    [
        (0, 0, None),
        (1, 500_000_000, 1.5),
        (0, 1, 1e-9),
        (-1, 0, errors.InvalidArgument),
        (0, -1, errors.InvalidArgument),
    ],
)
def test_how_long_a_delta_may_be_held_back(seconds: int, nanos: int, expected: Any) -> None:
    request = inference_pb2.StreamGenerateRequest(chunk_tokens=2)
    request.max_chunk_delay.seconds, request.max_chunk_delay.nanos = seconds, nanos
    if isinstance(expected, type):
        with pytest.raises(expected, match="cannot be negative"):
            convert.chunking_from_proto(request)
    else:
        assert convert.chunking_from_proto(request) == (2, expected)
    assert convert.chunking_from_proto(inference_pb2.StreamGenerateRequest(chunk_tokens=1)) == (None, None)
    assert convert.chunking_from_proto(inference_pb2.StreamGenerateRequest()) == (None, None)


def thinking_request(**chat: Any) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.chat.messages.add(role=types_pb2.ROLE_USER).parts.add(text="a")
    return json_format.ParseDict({"chat": chat, "sampling": {"max_reasoning_tokens": 0}}, request)


def test_options_of_reasoning_are_arguments_of_the_template() -> None:
    spec = convert.spec_from_proto(thinking_request(enable_thinking=True, reasoning_effort="low"))
    assert isinstance(spec.input, ChatInput)
    assert spec.input.template_arguments == {"enable_thinking": True, "reasoning_effort": "low"}
    assert spec.input.needed == ("enable_thinking", "reasoning_effort")
    assert spec.thinking is True and spec.max_reasoning_tokens == 0
    spec = convert.spec_from_proto(thinking_request(enable_thinking=False))
    assert isinstance(spec.input, ChatInput)
    assert spec.thinking is False and spec.input.needed == (), "a template without reasoning follows it as it is"
    spec = convert.spec_from_proto(thinking_request(chat_template_kwargs={"enable_thinking": True}))
    assert isinstance(spec.input, ChatInput)
    assert spec.thinking is True and spec.input.needed == ()
    both = thinking_request(enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(errors.InvalidArgument, match="is True, but chat_template_kwargs sets it to False") as error:
        convert.spec_from_proto(both)
    assert error.value.field == "chat.enable_thinking"


def test_only_text_of_the_assistant_is_continued() -> None:
    said = {"role": "ROLE_ASSISTANT", "parts": [{"text": "It is"}]}
    continuing = thinking_request(messages=[said], continue_final_message=True)
    for message in (continuing, inference_pb2.TokenizeRequest(chat=continuing.chat)):
        read = (
            convert.spec_from_tokenize
            if isinstance(message, inference_pb2.TokenizeRequest)
            else convert.spec_from_proto
        )
        value = read(message).input  # type: ignore[operator]
        assert isinstance(value, ChatInput) and value.continue_final and value.continued_text == "It is"
    call = {"id": "1", "name": "f", "arguments": "{}"}
    photo = {"image": {"media_id": "0"}}
    for last, why in (
        ({"role": "ROLE_USER", "parts": [{"text": "a"}]}, "role is user, not assistant"),
        ({**said, "toolCalls": [call]}, "ends with 1 tool calls; only text can be continued"),
        ({**said, "parts": [{"text": "a"}, photo]}, "does not end with text"),
        ({"role": "ROLE_ASSISTANT", "reasoning": "so"}, "does not end with text"),
    ):
        wrong = thinking_request(messages=[said, last], continue_final_message=True)
        refused(wrong, "chat.continue_final_message", f"chat.continue_final_message: the last message.* {why}")
    formatted = thinking_request(messages=[said], continue_final_message=True)
    formatted.sampling.response_format.json_object.SetInParent()
    refused(
        formatted,
        "sampling.response_format",
        "describes a whole answer and cannot be combined with chat.continue_final_message",
    )


def test_only_the_assistant_reasons() -> None:
    request = thinking_request(messages=[{"role": "ROLE_ASSISTANT", "reasoning": "so"}])
    spec = convert.spec_from_proto(request)
    assert isinstance(spec.input, ChatInput) and spec.input.messages[-1].reasoning == "so"
    with pytest.raises(errors.InvalidArgument, match="the role is user, not assistant"):
        convert.spec_from_proto(thinking_request(messages=[{"role": "ROLE_USER", "reasoning": "so"}]))


def test_reasoning_reaches_both_forms_of_an_answer() -> None:
    events = [
        Started("r", 1, 0, "m", "v", 1),
        Delta(0, "", (1,), (), 0, "so"), Delta(0, "red", (2, 3), (), 1, "."),
        Finished(0, "stop", Usage(1, 0, 0, 3, 0.0, 0.0, reasoning_tokens=2)),
    ]  # fmt: skip
    builder = convert.ResponseBuilder()
    for event in events:
        builder.add(event)
    (sample,) = builder.response().samples
    assert (sample.reasoning, sample.text, sample.usage.reasoning_tokens) == ("so.", "red", 2)
    assert [convert.event_to_proto(event).delta.reasoning for event in events[1:3]] == ["so", "."]


def test_the_layout_of_images_and_clips_reaches_every_form_of_an_answer() -> None:
    layouts = (
        MediaLayout((14, 20), 2, 70 + 6 * 35, slices=(2, 3), slice_grid=(10, 14), slices_first=True),
        MediaLayout((4, 6), 2, 18, frames=5),
    )
    builder = convert.ResponseBuilder()
    started = Started("r", 300, 70, "m", "v", 1, media=layouts)
    builder.add(started)
    builder.add(Finished(0, "stop", Usage(300, 70, 0, 3, 0.0, 0.0)))
    tokenized = convert.tokenized_to_proto(Tokenized((1,), 300, (70,), (18,), layouts))
    sliced, clip = convert.event_to_proto(started).started.media
    assert list(builder.response().media) == list(tokenized.media) == [sliced, clip]
    assert (sliced.grid_rows, sliced.grid_columns, sliced.merge_size, sliced.tokens) == (14, 20, 2, 280)
    assert (sliced.slice_rows, sliced.slice_columns) == (2, 3)
    assert (sliced.slice_grid_rows, sliced.slice_grid_columns) == (10, 14)
    assert (clip.grid_rows, clip.grid_columns, clip.tokens, clip.frames) == (4, 6, 18, 5)
    assert sliced.slices_first and not clip.slice_rows and not clip.slices_first


TAG = {"begin": "<a>", "regex": "b", "end": "</a>"}


@pytest.mark.parametrize(
    ("sampling", "field", "words"),
    [
        ({"response_format": {}}, "sampling.response_format", "is empty"),
        ({"response_format": {"json_schema": ""}}, "sampling.response_format.json_schema", "0 characters"),
        ({"response_format": {"json_schema": "{"}}, "sampling.response_format.json_schema", "is not valid JSON"),
        ({"response_format": {"json_schema": "[]"}}, "sampling.response_format.json_schema", "not a list"),
        ({"response_format": {"json_schema": '{"const": NaN}'}}, "sampling.response_format.json_schema", "NaN"),
        (
            {"response_format": {"json_schema": '{"items":' * 101 + "{}" + "}" * 101}},
            "sampling.response_format.json_schema", "nested 102 deep; at most 100",
        ),
        (
            {"response_format": {"json_schema": '{"x-guidance": {"lenient": true}}'}},
            "sampling.response_format.json_schema", "x-guidance",
        ),
        ({"response_format": {"regex": "a" * 131073}}, "sampling.response_format.regex", "131073 .* to 131072"),
        ({"response_format": {"lark": ""}}, "sampling.response_format.lark", "0 characters"),
        ({"response_format": {"choice": {}}}, "sampling.response_format.choice", "has 0 entries; .* from 1 to 4096"),
        ({"response_format": {"choice": {"choices": ["a", ""]}}}, "sampling.response_format.choice", r"\[1\] is empty"),
        (
            {"response_format": {"choice": {"choices": ["a" * 70000] * 2}}},
            "sampling.response_format.choice", "140000 characters",
        ),
        (
            {"response_format": {"structural_tags": {}}},
            "sampling.response_format.structural_tags", "tags has 0 entries; it must have from 1 to ",
        ),
        (
            {"response_format": {"structural_tags": {"tags": [{"begin": "a"}]}}},
            "sampling.response_format.structural_tags", "must have one of json_schema, regex, lark",
        ),
        (
            {"response_format": {"structural_tags": {"tags": [TAG], "triggers": ["<b"]}}},
            "sampling.response_format.structural_tags", "none of the triggers",
        ),
        (
            {"response_format": {"structural_tags": {"tags": [{**TAG, "begin": ""}]}}},
            "sampling.response_format.structural_tags", "begin is empty",
        ),
        ({"response_format": {"json_object": {}}, "ignore_eos": True}, "sampling.ignore_eos", "cannot be combined"),
        ({"bad_words": ["a", ""]}, "sampling.bad_words[1]", "0 characters"),
        ({"bad_words": ["a"] * 257}, "sampling.bad_words", "has 257 entries; .* to 256"),
    ],
)  # fmt: skip
def test_constraints_that_no_engine_could_make(sampling: dict[str, Any], field: str, words: str) -> None:
    request = prompt()
    json_format.ParseDict(sampling, request.sampling)
    with pytest.raises(errors.InvalidArgument, match=words) as error:
        convert.spec_from_proto(request)
    assert error.value.field is not None and error.value.field.startswith(field)


def test_constraints_as_the_engine_gets_them() -> None:
    request = prompt()
    assert convert.spec_from_proto(request).constraint is None
    tags = {"tags": [{"begin": "<a>", "regex": "b", "end": "</a>"}], "triggers": ["<"]}
    json_format.ParseDict(
        {"response_format": {"structural_tags": tags}, "allowed_token_ids": [7, 7, 3], "bad_words": ["x", "y"]},
        request.sampling,
    )
    made = convert.spec_from_proto(request).constraint
    assert made is not None and made.format is not None and made.format.kind == "structural_tags"
    content = [{"begin": "<a>", "kind": "regex", "content": "b", "end": "</a>"}]
    assert json.loads(made.format.source) == {"tags": content, "triggers": ["<"]}
    assert made.allowed_token_ids == {3, 7} and made.bad_words == ("x", "y")
