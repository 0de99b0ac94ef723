"""Converts a chat completion request to the message for the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from saccade._core.images import image_message
from saccade._core.requests import build_request
from saccade._core.tools import MODES
from saccade._openai.errors import field_in
from saccade._openai.schema import (
    AllowedToolChoice,
    ChatCompletion,
    ImagePart,
    ImageUrlPart,
    Message,
    NamedTool,
    Part,
    Sampling,
    TextPart,
    VideoPart,
    VideoUrlPart,
)
from saccade.errors import InvalidArgument
from saccade.v1 import inference_pb2, types_pb2

Opener: TypeAlias = "Callable[[str | types_pb2.Image, str], Any]"
"""Called with the image that a request names, a path or a message, and the name of the field; returns its bytes or
the message. Raises InvalidArgument."""

_SAME = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "n", "ignore_eos", "stop", "stop_token_ids", "allowed_token_ids", "bad_words",
    "response_format", "priority", "skip_special_tokens",
)  # fmt: skip
"""Fields with the same names as the arguments of the client's methods."""
_OTHERS = (
    "chat_template_kwargs",
    "reasoning_effort",
    "enable_thinking",
    "max_reasoning_tokens",
    "continue_final_message",
    "late_system_as_user",
    "clamp_max_tokens",
)


def chat_request(body: ChatCompletion, opener: Opener, *, request_id: str = "") -> inference_pb2.GenerateRequest:
    """The message for a chat completion. Raises InvalidArgument with the field of the chat completion, which may have
    been made from another request."""
    options = sampling_options(body)
    options["max_tokens"] = body.max_completion_tokens or body.max_tokens
    options |= {name: getattr(body, name) for name in _OTHERS}
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    try:
        request = build_request(message_dicts(body.messages, opener), request_id=request_id, **options)
    except InvalidArgument as error:
        error.field = error.field or field_in(error.message)
        raise
    _set_tools(request.chat, body)
    return request


def message_dicts(messages: Sequence[Message], opener: Opener) -> list[Mapping[str, Any]]:
    """Messages as the client's methods take them. Raises InvalidArgument."""
    return [_message(message, f"messages[{i}]", opener) for i, message in enumerate(messages)]


def sampling_options(body: Sampling) -> dict[str, Any]:
    """Keyword arguments of `build_request` for the fields that all requests share."""
    options: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    if body.top_k == -1:  # as other servers spell it
        options["top_k"] = 0
    for name in ("stop", "stop_token_ids", "bad_words"):
        options[name] = options[name] or ()
    options["logit_bias"] = {int(key): value for key, value in (body.logit_bias or {}).items()}
    options["model"] = body.model or ""
    options["return_prompt_token_ids"] = bool(body.return_token_ids)
    return options


def _message(message: Message, name: str, opener: Opener) -> Mapping[str, Any]:
    built: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if isinstance(content, list):
        built["content"] = [_part(part, f"{name}.content[{i}]", opener) for i, part in enumerate(content)]
    else:
        built["content"] = content or ""
    if reasoning := message.reasoning or message.reasoning_content:
        built["reasoning"] = reasoning
    return built


def _part(part: Part, name: str, opener: Opener) -> Any:
    match part:
        case str():
            return part
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case ImageUrlPart(image_url=place):
            return {"type": "image", "image": _opened(place.url, f"{name}.image_url.url", opener)}
        case ImagePart(image=source, media_id=media_id):
            return {"type": "image", "image": _opened(_named(source, media_id), f"{name}.image", opener)}
        case VideoUrlPart(video_url=place, max_frames=most):
            video = _opened(place.url, f"{name}.video_url.url", opener)
            return {"type": "video", "video": video, "max_frames": most}
        case VideoPart(video=frames) if isinstance(frames, list):
            opened = [_opened(frame, f"{name}.video[{i}]", opener) for i, frame in enumerate(frames)]
            return {"type": "video", "video": opened, **_timing(part)}
        case VideoPart(video=source, media_id=media_id):
            assert not isinstance(source, list)
            return {"type": "video", "video": _opened(_named(source, media_id), f"{name}.video", opener),
                    **_timing(part)}  # fmt: skip
    raise AssertionError(f"no part: {part!r}")


def _timing(part: VideoPart) -> dict[str, Any]:
    return {key: value for key in ("fps", "max_frames") if (value := getattr(part, key)) is not None}


def _named(source: str | None, media_id: str | None) -> str:
    return source if source is not None else f"media:{media_id}" if media_id else ""


def _opened(source: str, name: str, opener: Opener) -> Any:
    """The bytes or the message for an image's string."""
    if not source:
        raise InvalidArgument(f"{name}: expected a data URL, media:ID or a URL, got an empty string")
    scheme, colon, rest = source.partition(":")
    match scheme.lower() if colon else "":
        case "media":
            return opener(types_pb2.Image(media_id=rest), name)
        case "data" | "http" | "https":
            return opener(image_message(source, name), name)
    return opener(source, name)


def _set_tools(chat: inference_pb2.ChatInput, body: ChatCompletion) -> None:
    for tool in body.tools or ():
        function = tool.function
        chat.tools.add(
            name=function.name, description=function.description or "", strict=bool(function.strict),
            parameters_json="" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False),
        )  # fmt: skip
    match body.tool_choice:
        case str(mode):
            if body.tools or mode == "required":
                chat.tool_choice.mode = MODES[mode]
        case NamedTool(function=named):
            chat.tool_choice.name = named.name
        case AllowedToolChoice(allowed_tools=allowed):
            chat.tool_choice.mode = MODES[allowed.mode]
            chat.tool_choice.allowed.extend(tool.function.name for tool in allowed.tools)
    if body.parallel_tool_calls is not None and body.tools:
        chat.parallel_tool_calls = body.parallel_tool_calls
    for message, built in zip(body.messages, chat.messages, strict=True):
        for call in message.tool_calls or ():
            built.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
        built.tool_call_id = message.tool_call_id or ""
