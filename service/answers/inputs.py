"""Converts the inputs of requests from messages: conversations, prompts, token ids, and their media."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from google.protobuf import json_format

from saccade.v1 import inference_pb2, types_pb2
from service.answers.bounds import MAX_TEMPLATE_JSON
from service.answers.json_values import json_object
from service.answers.tool_inputs import (
    ToolHistory,
    calls_from_proto,
    in_order_of_calls,
    tool_arguments,
    tool_use_from_proto,
)
from service.common import errors
from service.common.types import (
    ChatInput,
    Image,
    MediaSource,
    Message,
    RawInput,
    TokensInput,
    Video,
)

MIN_FPS, MAX_FPS = 1e-6, 1000
"""One frame in eleven days to 1000 per second; labels give a frame's duration in whole milliseconds."""
_ROLES = {
    types_pb2.ROLE_SYSTEM: "system",
    types_pb2.ROLE_USER: "user",
    types_pb2.ROLE_ASSISTANT: "assistant",
    types_pb2.ROLE_TOOL: "tool",
}


def input_from_proto(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest | inference_pb2.EmbedRequest,
) -> tuple[ChatInput | RawInput | TokensInput, tuple[MediaSource, ...]]:
    """The input of a request, and its media in the order of their placeholders. Raises InvalidArgument."""
    match request.WhichOneof("input"):
        case "chat":
            return _chat(request.chat)
        case "prompt":
            return _prompt(request.prompt)
        case "tokens":
            return TokensInput(tuple(request.tokens.ids)), _media(request.tokens, "tokens")
    also = ", image" if isinstance(request, inference_pb2.EmbedRequest) else ""
    raise errors.InvalidArgument(f"one of chat, prompt, tokens{also} must be set", field="input")


def _chat(chat: inference_pb2.ChatInput) -> tuple[ChatInput, tuple[MediaSource, ...]]:
    if not chat.messages:
        raise errors.InvalidArgument("chat.messages is empty", field="chat.messages")
    messages, media_of, history = list[Message](), list[list[MediaSource]](), ToolHistory()
    for i, message in enumerate(chat.messages):
        where = f"chat.messages[{i}]"
        if message.role not in _ROLES:
            raise errors.InvalidArgument(
                f"{where}.role is {message.role}; it must be one of {', '.join(_ROLES.values())}", field=f"{where}.role"
            )
        parts, media = _parts(message, where)
        if message.reasoning and message.role != types_pb2.ROLE_ASSISTANT:
            raise errors.InvalidArgument(
                f"{where}.reasoning is set, but the role is {_ROLES[message.role]}, not assistant",
                field=f"{where}.reasoning",
            )
        calls, answered = calls_from_proto(message, where), history.answer(message, where)
        history.add(calls, where)
        messages.append(Message(_ROLES[message.role], parts, message.reasoning, calls, answered))
        media_of.append(media)
    order = in_order_of_calls(messages)
    if chat.continue_final_message:
        _check_continued(messages[-1])
    value = ChatInput(
        tuple(messages[i] for i in order), _template_arguments(chat), continue_final=chat.continue_final_message,
        late_system_as_user=chat.late_system_as_user,
    )  # fmt: skip
    value = _with_tools(_with_reasoning_options(value, chat), chat)
    return value, tuple(source for i in order for source in media_of[i])


def _parts(message: types_pb2.ChatMessage, where: str) -> tuple[tuple[str | None, ...], list[MediaSource]]:
    """The parts of a message, None for each image or video, and these."""
    parts, media = list[str | None](), list[MediaSource]()
    for i, part in enumerate(message.parts):
        path = f"{where}.parts[{i}]"
        match part.WhichOneof("part"):
            case "text":
                parts.append(part.text)
            case "image":
                parts.append(None)
                media.append(image_from_proto(part.image, f"{path}.image"))
            case "video":
                parts.append(None)
                media.append(_video(part.video, f"{path}.video"))
            case _:
                raise errors.InvalidArgument(f"{path} is empty", field=path)
    return tuple(parts), media


def _check_continued(last: Message) -> None:
    """Raises InvalidArgument for a last message that no answer can continue."""
    fault = ""
    if last.role != "assistant":
        fault = f"the last message's role is {last.role}, not assistant"
    elif last.tool_calls:
        fault = f"the last message ends with {len(last.tool_calls)} tool calls; only text can be continued"
    elif not last.parts or last.parts[-1] is None:
        fault = "the last message does not end with text"
    if fault:
        field = "chat.continue_final_message"
        raise errors.InvalidArgument(f"{field}: {fault}", field=field)


def _with_tools(value: ChatInput, chat: inference_pb2.ChatInput) -> ChatInput:
    use, arguments, needed = tool_use_from_proto(chat), dict(value.template_arguments), list(value.needed)
    if use is not None:
        if "tools" in arguments:
            raise errors.InvalidArgument(
                f"chat.tools has {len(use.tools)} tools, but chat_template_kwargs sets tools as well; use only one",
                field="chat.tools",
            )
        arguments["tools"] = tool_arguments(use)
        needed.append("tools")
    if any(message.tool_calls for message in value.messages):
        needed.append("tool_calls")
    return replace(value, template_arguments=arguments, needed=tuple(needed), tool_use=use)


def _with_reasoning_options(value: ChatInput, chat: inference_pb2.ChatInput) -> ChatInput:
    given: dict[str, Any] = {}
    if chat.HasField("enable_thinking"):
        given["enable_thinking"] = chat.enable_thinking
    if chat.reasoning_effort:
        given["reasoning_effort"] = chat.reasoning_effort
    for name, asked in given.items():
        if value.template_arguments.get(name, asked) != asked:
            raise errors.InvalidArgument(
                f"{name} is {asked!r}, but chat_template_kwargs sets it to {value.template_arguments[name]!r}",
                field=f"chat.{name}",
            )
    # A template that does not read enable_thinking already does what enable_thinking=false asks for.
    needed = tuple(name for name, asked in given.items() if asked is not False)
    return replace(value, template_arguments={**value.template_arguments, **given}, needed=needed)


def _prompt(prompt: inference_pb2.PromptInput) -> tuple[ChatInput | RawInput, tuple[MediaSource, ...]]:
    media = _media(prompt, "prompt")
    if prompt.raw:
        if prompt.chat_template_kwargs.fields or prompt.chat_template_kwargs_json:
            raise errors.InvalidArgument(
                "prompt.chat_template_kwargs cannot be used with raw text, to which no chat template is applied",
                field="prompt.chat_template_kwargs",
            )
        return RawInput(prompt.text, prompt.add_special_tokens), media
    if prompt.add_special_tokens:
        raise errors.InvalidArgument(
            "prompt.add_special_tokens needs prompt.raw: a chat template has the special tokens of its own",
            field="prompt.add_special_tokens",
        )
    parts = (*[None] * len(media), prompt.text)
    return ChatInput((Message("user", parts),), _template_arguments(prompt)), media


def _template_arguments(holder: inference_pb2.ChatInput | inference_pb2.PromptInput) -> Mapping[str, Any]:
    if holder.chat_template_kwargs_json:
        arguments = json_object("chat_template_kwargs_json", holder.chat_template_kwargs_json, MAX_TEMPLATE_JSON)
    else:  # a Struct holds only doubles, so whole numbers are taken as integers
        try:
            arguments = _whole(json_format.MessageToDict(holder.chat_template_kwargs))
        except ValueError as error:  # a number that is infinite or NaN
            raise errors.InvalidArgument(
                f"chat_template_kwargs cannot be read as JSON: {error}", field="chat_template_kwargs"
            ) from None
    if bad := sorted({"messages", "add_generation_prompt", "continue_final_message"} & set(arguments)):
        raise errors.InvalidArgument(f"chat_template_kwargs may not set {', '.join(bad)}", field="chat_template_kwargs")
    return arguments


def _whole(value: Any) -> Any:
    """The value with integers in place of whole floats."""
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def image_from_proto(image: types_pb2.Image, path: str) -> Image:
    match image.WhichOneof("source"):
        case "data":
            return Image(image.data, path)
        case "uri":
            return Image(b"", path, uri=image.uri)
        case "media_id":
            return Image(b"", path, media_id=image.media_id)
    raise errors.InvalidArgument(f"{path} has no source", field=path)


def _media(holder: inference_pb2.PromptInput | inference_pb2.TokensInput, path: str) -> tuple[MediaSource, ...]:
    images = (image_from_proto(image, f"{path}.images[{i}]") for i, image in enumerate(holder.images))
    videos = (_video(video, f"{path}.videos[{i}]") for i, video in enumerate(holder.videos))
    return (*images, *videos)


def _video(video: types_pb2.Video, path: str) -> Video:
    most = video.max_frames if video.HasField("max_frames") else None
    match video.WhichOneof("source"):
        case "data":
            return Video(video.data, path, max_frames=most)
        case "uri":
            return Video(b"", path, uri=video.uri, max_frames=most)
        case "media_id":
            return Video(b"", path, media_id=video.media_id, max_frames=most)
        case "frames":
            frames = [
                image_from_proto(image, f"{path}.frames.images[{i}]") for i, image in enumerate(video.frames.images)
            ]
            if not frames:
                raise errors.InvalidArgument(f"{path}.frames is empty", field=f"{path}.frames")
            fps = video.frames.fps if video.frames.HasField("fps") else None
            if fps is not None and not MIN_FPS <= fps <= MAX_FPS:
                raise errors.InvalidArgument(
                    f"{path}.frames.fps is {fps:g}; it must be from {MIN_FPS:g} to {MAX_FPS}",
                    field=f"{path}.frames.fps",
                )
            return Video(b"", path, frames=tuple(frames), fps=fps, max_frames=most)
    raise errors.InvalidArgument(f"{path} has no source", field=path)


def asked_thinking(value: ChatInput | RawInput | TokensInput) -> bool | None:
    """Whether the request asks for reasoning (True) or for none (False), by a field or an argument of the template;
    None: neither."""
    asked = value.template_arguments.get("enable_thinking") if isinstance(value, ChatInput) else None
    return asked if isinstance(asked, bool) else None
