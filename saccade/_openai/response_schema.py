"""The request of OpenAI's Responses API. The server stores nothing between calls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Discriminator, Field, Tag, model_validator

from saccade._openai.fields import PartFields
from saccade._openai.problems import validated
from saccade._openai.schema import (
    CachedPart,
    CacheOptions,
    ChatCompletion,
    DirectCaller,
    LogitBias,
    Strict,
    Strings,
    TextOr,
    TokenId,
    choice_kind,
)

TextKind: TypeAlias = Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
_TEXTS = get_args(TextKind)


class InputText(CachedPart):
    type: TextKind
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(CachedPart):
    type: Literal["input_image"]
    image_url: str | None = Field(None, description="A data URL, media:ID, or an https URL that the operator allows.")
    file_id: str | None = Field(None, description="The id of an uploaded image.")
    detail: str | None = Field(None, description="Ignored.")


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<image>" if kind == "input_image" else "<text>" if kind in _TEXTS else "<>"


ContentPart: TypeAlias = Annotated[
    Annotated[InputText, Tag("<text>")] | Annotated[InputImage, Tag("<image>")],
    Discriminator(
        _part_kind,
        custom_error_type="part",
        custom_error_message=f"expected a part of type input_image, {', '.join(_TEXTS[:-1])} or {_TEXTS[-1]}",
    ),
]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOr[ContentPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[InputText] | None = None
    content: list[InputText] | None = None
    encrypted_content: None = None
    status: str | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None
    caller: DirectCaller | None = None


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: TextOr[ContentPart]
    namespace: str | None = Field(None, description="Ignored: the call has it.")
    id: str | None = None
    status: str | None = None
    caller: DirectCaller | None = None


def _item_kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"<{kind}>"


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")],
    Discriminator(
        _item_kind,
        custom_error_type="item",
        custom_error_message="expected an item of type message, reasoning, function_call or function_call_output "
        "(no item is stored, so none can be referred to: clients need store=false)",
    ),
]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    description: str | None = Field(None, description="Ignored: the format is no part of the prompt.")
    strict: bool | None = None


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: str | None = None
    summary: str | None = Field(None, description="Ignored: the reasoning itself is in the answer.")
    generate_summary: str | None = None


def _tool_kind(value: Any) -> str:
    return f"<{value.get('type')}>" if isinstance(value, dict) else "<>"


class ResponseTool(Strict):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolNamespace(Strict):
    """Functions with a common prefix of their names. The model reads and writes the names `NAMESPACE.FUNCTION`."""

    type: Literal["namespace"]
    name: str = Field(min_length=1)
    description: str | None = Field(None, description="The model reads it after that of the first function.")
    tools: list[ResponseTool] = Field(min_length=1)


AnyTool: TypeAlias = Annotated[
    Annotated[ResponseTool, Tag("<function>")] | Annotated[ToolNamespace, Tag("<namespace>")],
    Discriminator(
        _tool_kind,
        custom_error_type="tool",
        custom_error_message="no tools are built in: expected one of type function or namespace",
    ),
]


class ResponseToolName(Strict):
    type: Literal["function"]
    name: str


class ResponseAllowedTools(Strict):
    """The only tools that may be called; all of `tools` are in the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponseToolName] = Field(min_length=1)


ResponseToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("<mode>")]
    | Annotated[ResponseToolName, Tag("<name>")]
    | Annotated[ResponseAllowedTools, Tag("<allowed>")],
    Discriminator(choice_kind),
]


Includable: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class ResponseRequest(Strict):
    """The body of `/v1/responses` and `/v1/responses/input_tokens`."""

    input: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[list[Item], Field(min_length=1), Tag("<items>")],
        Discriminator(lambda value: "<items>" if isinstance(value, list) else "<str>"),
    ]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0)
    include: list[Includable] | None = Field(
        None,
        description="Only log-probabilities add something: no tools are built in, and nothing is encrypted or stored.",
    )
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[AnyTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1, description="Has no effect: it limits only built-in tools.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = Field(None, description="Nothing is stored: send the conversation as input.")
    conversation: None = None
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.001, le=1000)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: Strings | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_reasoning_tokens: int | None = Field(None, ge=0)
    metadata: dict[str, Any] | None = None
    client_metadata: Any = Field(None, description="Ignored: facts about the client, which Codex sends.")
    store: bool | None = Field(None, description="Ignored: nothing is stored.")
    user: str | None = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: CacheOptions = Field(None, description="Ignored, but `prewarm`, which is an error.")
    prompt_cache_retention: Any = None

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream to be true")
        return self


def namespaced(namespace: str | None, name: str) -> str:
    """The name of a function of a namespace, or of none, as the model reads it."""
    return name if namespace is None else f"{namespace}.{name}"


def functions_of(body: ResponseRequest) -> Iterator[tuple[str, ToolNamespace | None, ResponseTool]]:
    """The functions of a request in order, those of namespaces too: the field of each, its namespace and itself."""
    for i, tool in enumerate(body.tools or ()):
        if isinstance(tool, ResponseTool):
            yield f"tools[{i}]", None, tool
        else:
            for k, function in enumerate(tool.tools):
                yield f"tools[{i}].tools[{k}]", tool, function


_FUNCTION = {"description", "parameters", "strict"}
_SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "chat_template_kwargs", "stream", "top_logprobs",
    "parallel_tool_calls", "max_reasoning_tokens",
)  # fmt: skip
"""Fields that chat completions have under the same names."""


def chat_of(body: ResponseRequest) -> tuple[ChatCompletion, PartFields]:
    """The same request as a chat completion, and the fields of its parts in this one."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    items = body.input
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    else:
        for i, item in enumerate(items):
            _add_item(messages, item, f"input[{i}]")
    _join_system(messages)
    fields = [message.pop("fields", []) for message in messages]
    for message in messages:
        message.pop("open", None)
    logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    options: dict[str, Any] = {
        **{name: getattr(body, name) for name in _SAME},
        "max_tokens": body.max_output_tokens, "logprobs": logprobs or None,
        "response_format": _format(body.text),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None, "late_system_as_user": True,
    }  # fmt: skip
    if body.tools:
        options["tools"] = [{"type": "function", "function": function} for function in _functions(body)]
    match body.tool_choice:
        case ResponseToolName(name=name):
            options["tool_choice"] = _named(name)
        case ResponseAllowedTools(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_named(tool.name) for tool in tools]}
            options["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        case choice:
            options["tool_choice"] = choice
    given = {name: value for name, value in options.items() if value is not None}
    return validated(ChatCompletion, {"messages": messages, **given}), fields


def _named(function: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function}}


def _join_system(messages: list[dict[str, Any]]) -> None:
    """Makes one system message of the system and developer messages that begin a chat: many templates reject several,
    and Codex sends some."""
    system = list(takewhile(lambda message: message["role"] in ("system", "developer"), messages))
    texts: list[str] = []
    for message in system:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if any(part["type"] != "text" for part in parts):
            return
        texts.append("".join(part["text"] for part in parts))
    if len(system) > 1:
        messages[: len(system)] = [{"role": "system", "content": "\n\n".join(texts)}]


def _functions(body: ResponseRequest) -> Iterator[dict[str, Any]]:
    for _, group, tool in functions_of(body):
        function = tool.model_dump(include=_FUNCTION, exclude_none=True)
        if group is not None and group.description and tool is group.tools[0]:
            about = f"Namespace {group.name}: {group.description}"
            function["description"] = f"{tool.description}\n\n{about}" if tool.description else about
        yield {"name": namespaced(group.name if group else None, tool.name), **function}


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    made = text.format
    if made.type != "json_schema":
        return {"type": made.type}
    return {"type": "json_schema", "json_schema": {"name": made.name or "answer", "schema": made.schema_}}


def _add_item(messages: list[dict[str, Any]], item: Item, field: str) -> None:
    """Adds an item to the messages; reasoning and calls become parts of an assistant message."""
    match item:
        case MessageItem(role=role, content=content):
            if role == "assistant" and messages and messages[-1].pop("open", False):
                messages[-1] |= _content(content, f"{field}.content")
                return
            messages.append({"role": role, **_content(content, f"{field}.content")})
        case ReasoningItem(summary=summary, content=parts):
            text = "".join(part.text for part in parts or summary or ())
            if messages and messages[-1].get("open") and "tool_calls" not in messages[-1]:
                messages[-1]["reasoning"] += text
                return
            messages.append({"role": "assistant", "content": "", "reasoning": text, "open": True})
        case FunctionCallItem(call_id=call_id, namespace=namespace, name=name, arguments=arguments):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": namespaced(namespace, name), "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case FunctionOutputItem(call_id=call_id, output=output):
            messages.append({"role": "tool", "tool_call_id": call_id, **_content(output, f"{field}.output")})


def _content(content: str | list[ContentPart], field: str) -> dict[str, Any]:
    """The content of a message, and the fields of its parts."""
    if isinstance(content, str):
        return {"content": content}
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, InputText):
            parts.append({"type": "text", "text": part.text})
        elif part.file_id is not None:
            parts.append({"type": "image", "media_id": part.file_id})
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.image_url or ""}})
    return {"content": parts, "fields": [f"{field}[{i}]" for i in range(len(parts))]}
