"""Builds a `GenerateRequest` from the arguments of `generate` and `stream`, for all three clients."""

from __future__ import annotations

import json
import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

from google.protobuf import json_format

from saccade._core.formats import ResponseFormat, format_message
from saccade._core.images import ImageInput, image_message, image_messages, located
from saccade._core.ranges import check_flag, check_integer, check_request, check_string, check_strings, check_text
from saccade._core.tools import ToolChoice, ToolInput, add_calls, set_tools
from saccade._core.videos import VideoInput, video_from_part, video_messages
from saccade.errors import InvalidArgument
from saccade.types import ChatMessage
from saccade.v1 import inference_pb2, types_pb2

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompt: TypeAlias = str | Sequence[ChatMessage] | Sequence[Mapping[str, Any]] | Sequence[int]

_ROLES = {
    "system": types_pb2.ROLE_SYSTEM,
    "user": types_pb2.ROLE_USER,
    "assistant": types_pb2.ROLE_ASSISTANT,
    "tool": types_pb2.ROLE_TOOL,
}
_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs", "max_reasoning_tokens")
MAX_DEPTH = 30
"""Maximum nesting of objects and lists in a value that is sent as a Struct: each level takes up to three of the 100
levels of messages that protobuf accepts."""
_THINKING = ("enable_thinking", "reasoning_effort")
_CHAT_FLAGS = ("continue_final_message", "late_system_as_user")
"""Fields of ChatInput that are false by default."""
_MESSAGE_KEYS = {"role", "content", "reasoning", "reasoning_content", "tool_calls", "tool_call_id"}
_IGNORED_KEYS = {"name", "annotations"}
"""Keys of OpenAI's messages that chat templates do not print."""
_Places: TypeAlias = dict[str, list[types_pb2.Part]]
"""Parts of a conversation that take the next of `images=` or `videos=`."""
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Sampling(TypedDict, total=False):
    """The further keyword arguments of `generate` and `stream`."""

    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool | None
    clamp_max_tokens: bool | None
    skip_special_tokens: bool | None
    n: int | None
    continued_token_ids: Sequence[int]
    model: str
    request_id: str
    priority: int | None
    prompt_logprobs: int | None
    response_format: ResponseFormat | None
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    enable_thinking: bool | None
    reasoning_effort: str | None
    max_reasoning_tokens: int | None
    tools: Iterable[ToolInput]
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None
    continue_final_message: bool
    late_system_as_user: bool
    return_prompt_token_ids: bool


class AllSampling(Sampling, total=False):
    """Also the sampling arguments that `generate` declares by name."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str]
    logprobs: int | None


class GenerateOptions(AllSampling, total=False):
    """All keyword arguments of `generate`."""

    images: Iterable[ImageInput] | ImageInput
    videos: Iterable[VideoInput] | VideoInput
    timeout: float | None
    chat_template_kwargs: Mapping[str, Any] | None


def build_request(
    prompt: Prompt,
    *,
    images: Iterable[ImageInput] | ImageInput = (),
    videos: Iterable[VideoInput] | VideoInput = (),
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **sampling: Unpack[AllSampling],
) -> inference_pb2.GenerateRequest:
    """The message for one call. The request id is drawn here, once, so that every attempt has the same one.

    Raises:
        InvalidArgument: an argument that no server could accept; the error names it.
    """
    unknown = sorted(sampling.keys() - AllSampling.__annotations__.keys())
    if unknown:
        known = sorted({*GenerateOptions.__annotations__, "raw"})
        raise InvalidArgument(f"unknown arguments: {', '.join(unknown)}; known are {', '.join(known)}")
    request = inference_pb2.GenerateRequest()
    request.request_id = check_string("request_id", sampling.get("request_id") or uuid.uuid4().hex)
    request.model = check_string("model", sampling.get("model") or "")
    media = _Media(image_messages(images), video_messages(videos))
    chat: dict[str, Any] = {name: sampling[name] for name in _THINKING if sampling.get(name) is not None}  # type: ignore[literal-required]
    chat |= {name: sampling[name] for name in _CHAT_FLAGS if sampling.get(name)}  # type: ignore[literal-required]
    tools, choice = sampling.get("tools") or (), sampling.get("tool_choice")
    if (chat or tools) and isinstance(prompt, str) and not raw:
        prompt = [{"role": "user", "content": prompt}]  # the same prompt, in the form that has these fields
    _set_input(request, prompt, media, raw, chat_template_kwargs)
    _set_chat_options(request, chat)
    if tools or choice not in (None, "none", "auto"):
        if not request.HasField("chat") and tools:
            raise InvalidArgument("tools: raw prompts and token ids do not pass through the chat template")
        set_tools(request.chat, tools, choice, sampling.get("parallel_tool_calls"))
    _set_sampling(request.sampling, sampling)
    with _naming("continued_token_ids"):
        request.continued_token_ids.extend(_token_ids(sampling.get("continued_token_ids") or ()))
    request.return_prompt_token_ids = check_flag(
        "return_prompt_token_ids", sampling.get("return_prompt_token_ids") or False
    )
    if (priority := sampling.get("priority")) is not None:
        request.priority = check_integer("priority", priority)
    check_request(request)
    return request


def _set_chat_options(request: inference_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if not request.HasField("chat"):
            raise InvalidArgument(f"{name}: raw prompts and token ids do not pass through the chat template")
        with _naming(name):
            setattr(request.chat, name, value)


class _Media(NamedTuple):
    """Messages for `images=` and `videos=`."""

    images: list[types_pb2.Image]
    videos: list[types_pb2.Video]


class _naming:
    """Turns errors of protobuf and Python about a wrong value into an InvalidArgument that names the argument."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, TypeError | ValueError | OverflowError | json_format.ParseError):
            raise InvalidArgument(f"{self.name}: {error}") from error


def _token_ids(values: Iterable[Any]) -> list[int]:
    """The values as a list, checked here because older versions of protobuf continue after a wrong value, name a later
    one in the error, and raise SystemError if the values come from an iterator."""
    ids = [operator.index(value) for value in values]
    for wrong in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= wrong < 2**32:
            raise ValueError(f"{wrong} is not a token id; expected 0 to {2**32 - 1}")
    return ids


def _set_sampling(message: types_pb2.SamplingParams, sampling: Mapping[str, Any]) -> None:
    for name in _INTEGERS:
        if sampling.get(name) is not None:
            setattr(message, name, check_integer(name, sampling[name]))
    for name in _FLOATS:
        if sampling.get(name) is not None:
            with _naming(name):
                setattr(message, name, float(sampling[name]))
    for name in ("ignore_eos", "clamp_max_tokens", "skip_special_tokens"):
        if sampling.get(name) is not None:
            setattr(message, name, check_flag(name, sampling[name]))
    message.stop.extend(check_strings("stop", sampling.get("stop") or ()))
    with _naming("stop_token_ids"):
        message.stop_token_ids.extend(_token_ids(sampling.get("stop_token_ids") or ()))
    if (allowed := sampling.get("allowed_token_ids")) is not None:
        with _naming("allowed_token_ids"):
            message.allowed_token_ids.extend(_token_ids(allowed))
        if not message.allowed_token_ids:  # an empty field of the message would allow all tokens
            raise InvalidArgument("allowed_token_ids: expected at least one token id, got none")
    message.bad_words.extend(check_strings("bad_words", sampling.get("bad_words") or ()))
    if sampling.get("response_format") is not None:
        built = format_message(sampling["response_format"])
        if built is not None:
            message.response_format.CopyFrom(built)
    bias = sampling.get("logit_bias") or {}
    if not isinstance(bias, Mapping):
        raise InvalidArgument(f"logit_bias: expected a mapping from token ids to numbers, got {type(bias).__name__}")
    with _naming("logit_bias"):
        for token_id, added in bias.items():
            message.logit_bias[operator.index(token_id)] = float(added)


def _set_input(
    request: inference_pb2.GenerateRequest,
    prompt: Prompt,
    media: _Media,
    raw: bool,
    template_kwargs: Mapping[str, Any] | None,
) -> None:
    if isinstance(prompt, str):
        if raw and template_kwargs:
            raise InvalidArgument("chat_template_kwargs: a raw prompt does not pass through the chat template")
        request.prompt.text = check_text("prompt", prompt)
        request.prompt.raw = check_flag("raw", raw)
        request.prompt.images.extend(media.images)
        request.prompt.videos.extend(media.videos)
        if template_kwargs:
            _set_template_arguments(request.prompt, template_kwargs)
        return
    items = _items(prompt)
    if isinstance(items[0], Mapping):
        if raw:
            raise InvalidArgument("raw: chat messages need the chat template; raw takes a string")
        request.chat.messages.extend(_chat_messages(items, media))
        if template_kwargs:
            _set_template_arguments(request.chat, template_kwargs)
        return
    if template_kwargs:
        raise InvalidArgument("chat_template_kwargs: token ids do not pass through the chat template")
    with _naming("prompt"):
        request.tokens.ids.extend(_token_ids(items))
    request.tokens.images.extend(media.images)
    request.tokens.videos.extend(media.videos)


def _items(prompt: Any) -> list[Any]:
    expected = "a string, a list of chat messages or a list of token ids"
    if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidArgument(f"prompt: expected {expected}, got {type(prompt).__name__}")
    items = list(prompt)
    if not items:
        raise InvalidArgument(f"prompt: expected {expected}, got an empty list")
    if not isinstance(items[0], Mapping) and not hasattr(items[0], "__index__"):
        raise InvalidArgument(f"prompt: expected {expected}, got a list of {type(items[0]).__name__}")
    return items


def _set_template_arguments(
    holder: inference_pb2.ChatInput | inference_pb2.PromptInput, values: Mapping[str, Any]
) -> None:
    """Objects are also sent as JSON, since a Struct does not keep their order. Older servers read the Struct."""
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"chat_template_kwargs: expected a mapping, got {type(values).__name__}")
    _check_depth("chat_template_kwargs", values)
    with _naming("chat_template_kwargs"):
        json_format.ParseDict(dict(values), holder.chat_template_kwargs)
        if any(isinstance(value, list | dict) for value in values.values()):
            holder.chat_template_kwargs_json = json.dumps(dict(values), ensure_ascii=False, allow_nan=False)


def _check_depth(name: str, value: Any) -> None:
    """Raises InvalidArgument for a value nested too deep for protobuf, which limits the nesting of messages."""
    depth, level = 0, [value]
    while level:
        nested = [item.values() if isinstance(item, Mapping) else item for item in level]
        level = [item for items in nested for item in items if isinstance(item, list | tuple | Mapping)]
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidArgument(f"{name}: nested more than {MAX_DEPTH} levels deep")


def _chat_messages(messages: list[Any], media: _Media) -> list[types_pb2.ChatMessage]:
    """The conversation, with `images` inserted in parts {"type": "image"} that have no image of their own, and `videos`
    likewise; where there is no such part, they come first in the last user message."""
    waiting: _Places = {"image": [], "video": []}
    built = [_chat_message(message, f"messages[{i}]", waiting) for i, message in enumerate(messages)]
    first: list[types_pb2.Part] = []
    for kind, given in (("image", media.images), ("video", media.videos)):
        places = waiting[kind]
        if places and len(places) != len(given):
            raise InvalidArgument(
                f"{kind}s: {len(given)} are given, but the messages have {len(places)} parts for them"
            )
        for part, item in zip(places, given, strict=False):
            getattr(part, kind).CopyFrom(item)
        if not places:
            first += (types_pb2.Part(**{kind: item}) for item in given)
    if first:
        users = [message for message in built if message.role == types_pb2.ROLE_USER]
        if not users:
            name = "images" if media.images else "videos"
            raise InvalidArgument(f"{name}: the conversation has no user message that could hold them")
        parts = [*first, *users[-1].parts]
        del users[-1].parts[:]
        users[-1].parts.extend(parts)
    return built


def _chat_message(message: Any, name: str, waiting: _Places) -> types_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidArgument(f"{name}: expected a dict with role and content, got {type(message).__name__}")
    given = {key for key, value in message.items() if value is not None}  # OpenAI's library returns unset keys as None
    if extra := sorted(map(str, given - _MESSAGE_KEYS - _IGNORED_KEYS)):
        raise InvalidArgument(f"{name}: unknown keys {', '.join(extra)}; known are {', '.join(sorted(_MESSAGE_KEYS))}")
    if not isinstance(message.get("role"), str) or message["role"] not in _ROLES:
        raise InvalidArgument(f"{name}.role: expected one of {', '.join(_ROLES)}, got {message.get('role')!r}")
    built = types_pb2.ChatMessage(role=_ROLES[message["role"]])
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    if reasoning and (not isinstance(reasoning, str) or message["role"] != "assistant"):
        raise InvalidArgument(f"{name}.reasoning: expected a string, in a message of the assistant")
    built.reasoning = check_text(f"{name}.reasoning", reasoning)
    content = message.get("content")
    if message.get("tool_calls"):
        add_calls(built, message["tool_calls"], f"{name}.tool_calls")
        content = "" if content is None else content
    built.tool_call_id = check_string(f"{name}.tool_call_id", message.get("tool_call_id") or "")
    if isinstance(content, str):
        built.parts.add(text=check_text(f"{name}.content", content))
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        for i, part in enumerate(content):
            _add_part(built, part, f"{name}.content[{i}]", waiting)
    else:
        raise InvalidArgument(f"{name}.content: expected a string or a list of parts, got {type(content).__name__}")
    return built


def _add_part(message: types_pb2.ChatMessage, part: Any, name: str, waiting: _Places) -> None:
    kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        message.parts.add(text=check_string(f"{name}.text", part if isinstance(part, str) else part.get("text")))
    elif kind in ("image", "image_url"):
        added = message.parts.add()
        source = _part_source(part, name)
        if source is None:
            waiting["image"].append(added)
        else:
            added.image.CopyFrom(image_message(source, name))
    elif kind in ("video", "video_url"):
        added = message.parts.add()
        video = video_from_part(part, name)
        if video is None:
            waiting["video"].append(added)
        else:
            added.video.CopyFrom(video)
    else:
        raise InvalidArgument(
            f"{name}: expected a part of type text, image, image_url, video or video_url, got {kind or part!r}"
        )


def _part_source(part: Mapping[str, Any], name: str) -> Any:
    """The image inside an image part, in any of the common spellings; None if the part is only a placeholder."""
    if part.get("media_id"):
        return types_pb2.Image(media_id=check_string(f"{name}.media_id", part["media_id"]))
    for key in ("image", "image_url", "url", "path", "data"):
        value = part.get(key)
        if value is not None:
            return located(value, f"{name}.image_url") if key == "image_url" else value
    return None


def chat_messages(
    messages: str | Sequence[ChatMessage] | Sequence[Mapping[str, Any]], system: str | None
) -> list[Mapping[str, Any]]:
    """The conversation that `chat` sends, with the system's message first."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    listed = _items(messages)
    if not isinstance(listed[0], Mapping):
        raise InvalidArgument(f"messages: expected a string or a list of messages, got {type(listed[0]).__name__}")
    return listed if system is None else [{"role": "system", "content": system}, *listed]


def embed_request(
    prompt: Prompt,
    *,
    images: Iterable[ImageInput] | ImageInput = (),
    videos: Iterable[VideoInput] | VideoInput = (),
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    model: str = "",
    priority: int | None = None,
) -> inference_pb2.EmbedRequest:
    """The message for `embed`."""
    built = build_request(
        prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs, model=model,
        priority=priority,
    )  # fmt: skip
    request = inference_pb2.EmbedRequest(request_id=built.request_id, model=built.model)
    if built.HasField("priority"):
        request.priority = built.priority
    _copy_input(built, request)
    return request


def embed_image_request(image: ImageInput, *, model: str = "", request_id: str = "") -> inference_pb2.EmbedRequest:
    """The message for `embed_image`."""
    return inference_pb2.EmbedRequest(
        request_id=check_string("request_id", request_id or uuid.uuid4().hex), model=check_string("model", model),
        image=image_message(image),
    )  # fmt: skip


def _copy_input(source: inference_pb2.GenerateRequest, target: Any) -> None:
    for name in ("chat", "prompt", "tokens"):
        if source.HasField(name):
            getattr(target, name).CopyFrom(getattr(source, name))


def tokenize_request(
    prompt: Prompt,
    *,
    images: Iterable[ImageInput] | ImageInput = (),
    videos: Iterable[VideoInput] | VideoInput = (),
    raw: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
    late_system_as_user: bool = False,
    model: str = "",
) -> inference_pb2.TokenizeRequest:
    """The message for `tokenize`."""
    built = build_request(
        prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs, model=model,
        continue_final_message=continue_final_message, late_system_as_user=late_system_as_user,
    )  # fmt: skip
    request = inference_pb2.TokenizeRequest(model=built.model)
    _copy_input(built, request)
    return request
