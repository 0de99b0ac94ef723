"""Converts a ModelInferRequest to a `saccade.v1.GenerateRequest`. The fields are described in
`service.rpc.kserve_tensors`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from saccade.v1 import inference_pb2, types_pb2
from service.answers.json_values import check_json_size, check_nesting
from service.answers.weigh import MAX_FIELDS
from service.common import errors
from service.rpc.kserve_tensors import OUTPUTS, read_tensors
from service.rpc.media_urls import set_source

MAX_JSON_VALUES = 2**18
"""Largest number of values and keys of the JSON in one input. Of objects and arrays it is `MAX_FIELDS`, because each
would be at least a field in the message of a gRPC client."""
LONGEST_TIMEOUT = 366 * 86400.0
"""Largest timeout, in seconds; longer ones are reduced to it, so that no clock overflows."""
_OUR_PARAMETERS = {"triton_enable_empty_final_response", "timeout", "priority", "sequence_id", "sequence_start",
                   "sequence_end", "stream", "exclude_input_in_output"}  # fmt: skip
_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - {"n", "logprobs", "prompt_logprobs"}
"""Sampling parameters that may be set: an answer has one sample, and no outputs for log-probabilities."""
_CHAT_OPTIONS: dict[str, type] = {"enable_thinking": bool, "reasoning_effort": str, "continue_final_message": bool}
"""Options of the chat template and their types."""
_LISTS = {"stop", "stop_token_ids", "allowed_token_ids", "bad_words"}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""A token id as a JSON key. protobuf would also accept 01 and +1 as names of id 1, and the last of them would win."""
_TOOLS = ("tool_choice", "parallel_tool_calls")
_MODES = {"auto": types_pb2.TOOL_MODE_AUTO, "none": types_pb2.TOOL_MODE_NONE, "required": types_pb2.TOOL_MODE_REQUIRED}
_ROLES = {
    "system": types_pb2.ROLE_SYSTEM, "developer": types_pb2.ROLE_SYSTEM, "user": types_pb2.ROLE_USER,
    "assistant": types_pb2.ROLE_ASSISTANT, "tool": types_pb2.ROLE_TOOL,
}  # fmt: skip


@dataclass
class Question:
    """A parsed ModelInferRequest."""

    request: inference_pb2.GenerateRequest
    outputs: tuple[str, ...]
    stream: bool
    empty_final: bool
    timeout: float | None
    prefix: str = ""
    """Text that is placed before the answer: the prompt, if the request asks for it."""


def read_request(request: Any) -> Question:
    """Parses a request. Raises InvalidArgument."""
    tensors = read_tensors(request)
    parameters = {name: _parameter(name, value) for name, value in request.parameters.items()}
    values = _values(tensors, parameters)
    options = {name: values.pop(name) for name in _CHAT_OPTIONS if name in values}
    choice, parallel = (values.pop(name, None) for name in _TOOLS)
    generate = inference_pb2.GenerateRequest(sampling=_sampling(values))
    _fill_prompt(generate, tensors)
    _set_options(generate, options)
    _set_tools(generate, tensors, choice, parallel)
    if parameters.get("sequence_id"):
        raise errors.InvalidArgument("stateful sequences are not supported", field="parameters.sequence_id")
    # In Triton, 1 is the most urgent priority, and 0 stands for the default.
    generate.priority = -min(_count(parameters, "priority"), 2**31 - 1)
    # Each output only once: otherwise a request could make its answer larger by repeating outputs.
    wanted = tuple(dict.fromkeys(output.name for output in request.outputs)) or tuple(name for name, _, _ in OUTPUTS)
    if unknown := sorted(set(wanted) - {name for name, _, _ in OUTPUTS}):
        raise errors.InvalidArgument(
            f"no output {unknown[0]!r}; outputs are {', '.join(n for n, _, _ in OUTPUTS)}", field="outputs"
        )
    timeout = min(_count(parameters, "timeout") / 1e6, LONGEST_TIMEOUT)
    stream = _flag(tensors, parameters, "stream", False)
    return Question(
        generate, wanted, stream, _flag({}, parameters, "triton_enable_empty_final_response", False), timeout or None,
        _prefix(tensors, parameters, stream),
    )  # fmt: skip


def _count(parameters: dict[str, Any], name: str) -> int:
    """A parameter that is an integer of at least 0; 0 if it is missing. Raises InvalidArgument."""
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise errors.InvalidArgument(
            f"{name} is {str(value)[:100]!r}; it must be a whole number, at least 0", field=f"parameters.{name}"
        )
    return value


def _flag(tensors: dict[str, list[Any]], parameters: dict[str, Any], name: str, default: bool) -> bool:
    """A BOOL input or, if there is none, a parameter. Raises InvalidArgument."""
    value = _single(tensors, name) if name in tensors else parameters.get(name, default)
    if not isinstance(value, bool):
        raise errors.InvalidArgument(
            f"{name} is {str(value)[:100]!r}; it must be true or false", field=f"parameters.{name}"
        )
    return value


def _prefix(tensors: dict[str, list[Any]], parameters: dict[str, Any], stream: bool) -> str:
    """The prompt if `exclude_input_in_output` is false, which puts it before the answer as in Triton's vLLM backend;
    empty by default. Raises InvalidArgument."""
    name = "exclude_input_in_output"
    if _flag(tensors, parameters, name, True):
        return ""
    if stream or "text_input" not in tensors:
        why = "on a stream" if stream else "with messages"
        raise errors.InvalidArgument(f"{name} cannot be false {why}", field=name)
    return _text(_single(tensors, "text_input"), "text_input")


def _parameter(name: str, value: Any) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise errors.InvalidArgument(f"parameter {name!r} has no value", field=f"parameters.{name}")
    return getattr(value, kind)


def _values(tensors: dict[str, list[Any]], parameters: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters and other options by name, from `sampling_parameters` and from the request's parameters,
    which take precedence."""
    values: dict[str, Any] = {}
    if "sampling_parameters" in tensors:
        parsed = _json(_single(tensors, "sampling_parameters"), "sampling_parameters")
        if not isinstance(parsed, dict):
            raise errors.InvalidArgument("sampling_parameters must be a JSON object", field="sampling_parameters")
        values |= parsed
    return values | {name: value for name, value in parameters.items() if name not in _OUR_PARAMETERS}


def _set_options(generate: inference_pb2.GenerateRequest, options: dict[str, Any]) -> None:
    """Sets options of the chat template; a prompt becomes a chat with a single message. Raises InvalidArgument."""
    for name, value in options.items():
        if not isinstance(value, _CHAT_OPTIONS[name]):
            kind = {bool: "true or false", str: "a string"}[_CHAT_OPTIONS[name]]
            raise errors.InvalidArgument(
                f"{name} is {str(value)[:100]!r}; it must be {kind}", field=f"parameters.{name}"
            )
    if not options:
        return
    if generate.HasField("prompt"):
        text, images = generate.prompt.text, list(generate.prompt.images)
        message = generate.chat.messages.add(role=types_pb2.ROLE_USER)
        for image in images:
            message.parts.add(image=image)
        message.parts.add(text=text)
    for name, value in options.items():
        setattr(generate.chat, name, value)


def _sampling(values: dict[str, Any]) -> types_pb2.SamplingParams:
    sampling = types_pb2.SamplingParams()
    for name, value in values.items():
        if name not in _SAMPLING:
            raise errors.InvalidArgument(
                f"no parameter {name!r}; parameters are {', '.join(sorted(_SAMPLING | _CHAT_OPTIONS.keys()))}",
                field=f"parameters.{name}"[:100],
            )  # fmt: skip
        if name in _LISTS and not isinstance(value, list):
            value = [value]
        if name == "response_format" and isinstance(value, str):  # a parameter of a request is never an object
            value = _json(value.encode(), "response_format")
        if name == "response_format" and value == {"type": "text"}:  # the same as no response_format
            continue
        if name == "response_format" and isinstance(value, dict) and "type" in value:
            value = _of_openai(value)
        try:
            if name == "logit_bias" and not all(_TOKEN_ID.fullmatch(key) for key in value or ()):
                raise ValueError
            json_format.ParseDict({name: value}, sampling)
        except (json_format.ParseError, ValueError, TypeError):
            raise errors.InvalidArgument(f"{name} cannot be {str(value)[:100]!r}", field=f"parameters.{name}") from None
    return sampling


def _of_openai(value: dict[str, Any]) -> dict[str, Any]:
    """Converts OpenAI's `response_format`, extended by `regex`, `lark` and `choice`, to the fields of
    `saccade.v1.ResponseFormat`."""
    match value:
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json_schema": json.dumps(schema)}
        case {"type": "json_object"}:
            return {"json_object": {}}
        case {"type": "regex" | "lark" as kind, **rest} if rest.keys() == {kind}:
            return rest
        case {"type": "choice", "choices": list() as choices}:
            return {"choice": {"choices": choices}}
    raise errors.InvalidArgument(f"response_format cannot be {str(value)[:100]!r}", field="parameters.response_format")


def _single(tensors: dict[str, list[Any]], name: str) -> Any:
    values = tensors[name]
    if len(values) != 1:
        raise errors.InvalidArgument(f"{name} has {len(values)} elements; it must have one", field=name)
    return values[0]


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise errors.InvalidArgument(
            f"{name} is not UTF-8: byte {error.start} is {data[error.start]}", field=name
        ) from None


def _json(data: bytes, name: str) -> Any:
    text = _text(data, name)
    check_json_size(name, data, MAX_FIELDS, MAX_JSON_VALUES)
    check_nesting(name, text)
    try:
        value = json.loads(text)
    except ValueError as error:  # not JSON, or a number of thousands of digits
        raise errors.InvalidArgument(f"{name} is not JSON: {str(error)[:100]}", field=name) from None
    if _SURROGATE.search(text) and not _is_unicode(value):
        raise errors.InvalidArgument(f"{name} has a \\u escape that is half of a surrogate pair", field=name)
    return value


_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def _is_unicode(value: Any) -> bool:
    """Whether all strings in a JSON value can be encoded as UTF-8: lone surrogates cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _fill_prompt(generate: inference_pb2.GenerateRequest, tensors: dict[str, list[Any]]) -> None:
    images = [types_pb2.Image(data=data) for data in tensors.get("image", ())]
    images += [_image_from_url(_text(url, "image_url")) for url in tensors.get("image_url", ())]
    if ("text_input" in tensors) == ("messages" in tensors):
        raise errors.InvalidArgument("exactly one of the inputs text_input and messages is needed", field="inputs")
    if "text_input" in tensors:
        generate.prompt.text = _text(_single(tensors, "text_input"), "text_input")
        generate.prompt.images.extend(images)
        return
    entries = _json(_single(tensors, "messages"), "messages")
    if not isinstance(entries, list):
        raise errors.InvalidArgument("messages must be a JSON list", field="messages")
    waiting = iter(images)
    for index, entry in enumerate(entries):
        generate.chat.messages.append(_chat_message(entry, f"messages[{index}]", waiting))
    if list(waiting):
        raise errors.InvalidArgument("there are more images than image parts in messages", field="image")


def _set_tools(
    generate: inference_pb2.GenerateRequest, tensors: dict[str, list[Any]], choice: Any, parallel: Any
) -> None:
    if "tools" not in tensors and choice is None and parallel is None:
        return
    if not generate.HasField("chat"):
        raise errors.InvalidArgument("tools need messages instead of text_input", field="tools")
    tools = _json(_single(tensors, "tools"), "tools") if "tools" in tensors else []
    if not isinstance(tools, list):
        raise errors.InvalidArgument("tools must be a JSON list", field="tools")
    for i, tool in enumerate(tools):
        generate.chat.tools.append(_tool(tool, f"tools[{i}]"))
    if choice is not None and not isinstance(choice, str):
        raise errors.InvalidArgument("tool_choice must be a string", field="parameters.tool_choice")
    if choice in _MODES:
        generate.chat.tool_choice.mode = _MODES[choice]
    elif choice is not None:
        generate.chat.tool_choice.name = choice
    if parallel is not None:
        if not isinstance(parallel, bool):
            raise errors.InvalidArgument(
                "parallel_tool_calls must be true or false", field="parameters.parallel_tool_calls"
            )
        generate.chat.parallel_tool_calls = parallel


def _tool(tool: Any, where: str) -> types_pb2.Tool:
    match tool:
        case {"type": "function", "function": {"name": str(name)} as function}:
            description, schema = function.get("description") or "", function.get("parameters") or {}
            if isinstance(description, str) and isinstance(schema, dict):
                return types_pb2.Tool(
                    name=name, description=description, strict=function.get("strict") is True,
                    parameters_json=json.dumps(schema, ensure_ascii=False),
                )  # fmt: skip
    raise errors.InvalidArgument(
        f"{where} must be a function with a name and, optionally, a description (text) and parameters (an object)",
        field=where,
    )


def _add_calls(chat: types_pb2.ChatMessage, entry: dict[str, Any], where: str) -> None:
    calls, answered = entry.get("tool_calls"), entry.get("tool_call_id")
    if not isinstance(calls, list | None) or not isinstance(answered, str | None):
        raise errors.InvalidArgument(f"{where}: tool_calls must be a list, tool_call_id a string", field=where)
    chat.tool_call_id = answered or ""
    for i, call in enumerate(calls or ()):
        match call:
            case {"id": str(id), "function": {"name": str(name), "arguments": str(arguments)}}:
                chat.tool_calls.add(id=id, name=name, arguments=arguments)
            case _:
                raise errors.InvalidArgument(
                    f"{where}.tool_calls[{i}] must have an id and a function with a name and arguments, all strings",
                    field=where,
                )


def _image_from_url(url: str) -> types_pb2.Image:
    image = types_pb2.Image()
    set_source(image, url, "image_url")
    return image


def _video_from_url(url: str, max_frames: Any, where: str) -> types_pb2.Video:
    video = types_pb2.Video()
    set_source(video, url, "video_url")
    if max_frames is not None:
        if type(max_frames) is not int or not 0 < max_frames < 2**31:
            raise errors.InvalidArgument(
                f"{where}: max_frames is {str(max_frames)[:100]!r}; it must be a whole number, at least 1", field=where
            )
        video.max_frames = max_frames
    return video


def _chat_message(entry: Any, where: str, images: Any) -> types_pb2.ChatMessage:
    role = entry.get("role") if isinstance(entry, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise errors.InvalidArgument(f"{where} needs a role, one of {', '.join(_ROLES)}", field=where)
    content = entry.get("content")
    if content is not None and not isinstance(content, str | list):
        raise errors.InvalidArgument(f"{where} has a content that is neither text nor a list of parts", field=where)
    reasoning = entry.get("reasoning") or entry.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise errors.InvalidArgument(f"{where} has reasoning that is not text", field=where)
    chat = types_pb2.ChatMessage(role=_ROLES[role], reasoning=reasoning)
    _add_calls(chat, entry, where)
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        match part:
            case {"type": "text", "text": str(text)}:
                chat.parts.add(text=text)
            case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
                chat.parts.add(image=_image_from_url(url))
            case {"type": "image"}:
                if (image := next(images, None)) is None:
                    raise errors.InvalidArgument(f"{where} has more image parts than there are images", field=where)
                chat.parts.add(image=image)
            case {"type": "video_url", "video_url": {"url": str(url)}} | {"type": "video_url", "video_url": str(url)}:
                chat.parts.add(video=_video_from_url(url, part.get("max_frames"), where))
            case _:
                raise errors.InvalidArgument(f"{where} has a part that is neither text, image nor video", field=where)
    return chat
