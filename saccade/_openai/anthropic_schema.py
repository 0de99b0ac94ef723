"""The request of Anthropic's Messages API, and its conversion to a chat completion."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from saccade._openai.fields import PartFields
from saccade._openai.problems import validated
from saccade._openai.schema import ChatCompletion, DirectCaller, Messages, Strict, TextOr
from saccade.errors import InvalidArgument


class Block(Strict):
    cache_control: Any = Field(None, description="Ignored: the server caches whatever it can.")


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Strict):
    type: Literal["url"]
    url: str


class FileSource(Strict):
    type: Literal["file"]
    file_id: str


def _kind(value: Any) -> str:
    return f"<{value.get('type')}>" if isinstance(value, dict) else "<>"


class ImageBlock(Block):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")]
        | Annotated[UrlSource, Tag("<url>")]
        | Annotated[FileSource, Tag("<file>")],
        Discriminator(
            _kind, custom_error_type="source", custom_error_message="expected a source of type base64, url or file"
        ),
    ]


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None


ResultPart: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    Discriminator(_kind, custom_error_type="block", custom_error_message="expected a block of type text or image"),
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOr[ResultPart] | None = None
    is_error: bool | None = None


AnyBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        _kind,
        custom_error_type="block",
        custom_error_message="expected a block of type text, image, thinking, tool_use or tool_result",
    ),
]


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: TextOr[AnyBlock]


class AnthropicTool(Block):
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = Field(None, description="Ignored: arguments are sent as they are written.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AnthropicToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted`: blocks of thinking have no text. It is never summarized."
    )


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


DEFAULT_EFFORT = "high"
"""In Anthropic's API it means the same as no effort. Claude Code sends it with each request."""


class OutputConfig(Strict):
    effort: str | None = Field(
        None,
        description="Passed to the chat template as `reasoning_effort`. If the template does not use it, values other "
        "than `high`, which is the default of Anthropic's API, are errors.",
    )
    format: OutputFormat | None = None


class ContextEdit(Strict):
    """Claude Code sends it with each request. Other edits would remove parts of the conversation."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Strict):
    edits: list[ContextEdit] | None = None


class CountTokens(Strict):
    """The body of `/v1/messages/count_tokens`."""

    messages: Messages[AnthropicMessage]
    model: str | None = None
    system: TextOr[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = Field(
        None, description="Only edits that keep everything: the server removes nothing from a conversation."
    )
    cache_control: Any = Field(None, description="Ignored: the server caches whatever it can.")


class MessagesRequest(CountTokens):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=0, lt=2**64)
    stream: bool | None = None
    thread: Any = Field(None, description="Not supported: nothing is stored. The error tells Anthropic's clients so.")
    metadata: Any = Field(None, description="Ignored.")
    service_tier: Any = Field(None, description="Ignored.")
    speed: Literal["standard"] | None = None


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(body: CountTokens) -> tuple[ChatCompletion, PartFields]:
    """The same request as a chat completion, and the fields of its parts in this one."""
    continues = _continues(body.messages[-1], f"messages[{len(body.messages) - 1}].content")
    messages = _messages(body)
    options: dict[str, Any] = {
        "model": body.model, "continue_final_message": continues or None, "late_system_as_user": True
    }  # fmt: skip
    if isinstance(body, MessagesRequest):
        options |= {
            "max_tokens": body.max_tokens, "stop": body.stop_sequences, "temperature": body.temperature,
            "top_p": body.top_p, "top_k": body.top_k, "seed": body.seed, "stream": body.stream,
        }  # fmt: skip
    if body.thinking is not None:
        options["max_reasoning_tokens"] = body.thinking.budget_tokens
        if body.thinking.type != "adaptive":
            options["enable_thinking"] = body.thinking.type == "enabled"
    if body.output_config is not None:
        if (effort := body.output_config.effort) == DEFAULT_EFFORT:  # no error if the template does not use it
            options["chat_template_kwargs"] = {"reasoning_effort": effort}
        else:
            options["reasoning_effort"] = effort
        if (made := body.output_config.format) is not None:
            schema = {"name": "answer", "schema": made.schema_}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.tools:
        options["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        choice = body.tool_choice
        named = {"type": "function", "function": {"name": choice.name or ""}}
        options["tool_choice"] = _CHOICES.get(choice.type, named)
        if choice.disable_parallel_tool_use is not None:
            options["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    given = {name: value for name, value in options.items() if value is not None}
    fields = [made.pop("fields", []) for made in messages]
    return validated(ChatCompletion, {"messages": messages, **given}), fields


def _messages(body: CountTokens) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system is not None:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        messages.append({"role": "system", "content": text})
    for i, message in enumerate(body.messages):
        if message.content:
            _add_message(messages, message, f"messages[{i}].content")
        elif message.role != "assistant" or i + 1 < len(body.messages):  # an empty last one begins the answer
            raise InvalidArgument(
                f"messages[{i}].content: expected content; only a final assistant message may be empty"
            )
    return messages


def _continues(last: AnthropicMessage, name: str) -> bool:
    """Whether the answer continues the last message, which is so if the assistant's text ends it. Raises
    InvalidArgument."""
    text = _final_text(last) if last.role == "assistant" else ""
    if text != text.rstrip():
        raise InvalidArgument(f"{name}: final assistant content cannot end with trailing whitespace")
    return bool(text)


def _final_text(message: AnthropicMessage) -> str:
    """The text with which a message ends; empty if it ends with something else."""
    if isinstance(message.content, str):
        return message.content
    end = takewhile(lambda block: isinstance(block, TextBlock), reversed(message.content))
    return "".join(block.text for block in reversed(list(end)) if isinstance(block, TextBlock))


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _add_message(messages: list[dict[str, Any]], message: AnthropicMessage, field: str) -> None:
    """Adds a message, and one before it for each result of a tool. `fields`: of the parts of its content."""
    if isinstance(message.content, str):
        messages.append({"role": message.role, "content": message.content})
        return
    parts: list[dict[str, Any]] = []
    fields: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts = ""
    for i, block in enumerate(message.content):
        match block:
            case ToolResultBlock(tool_use_id=call_id, content=content):
                told = content if isinstance(content, str) else [_part(part) for part in content or ()]
                within = [f"{field}[{i}].content[{k}]" for k in range(len(told))] if isinstance(told, list) else []
                messages.append({"role": "tool", "tool_call_id": call_id, "content": told, "fields": within})
            case ToolUseBlock(id=call_id, name=name, input=value):
                function = {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case ThinkingBlock(thinking=text):
                thoughts += text
            case TextBlock() | ImageBlock():
                parts.append(_part(block))
                fields.append(f"{field}[{i}]")
    if parts or calls or thoughts:
        made: dict[str, Any] = {"role": message.role, "content": parts, "fields": fields}
        if thoughts:
            made["reasoning"] = thoughts
        if calls:
            made["tool_calls"] = calls
        messages.append(made)


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    match block.source:
        case Base64Source(media_type=kind, data=data):
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case UrlSource(url=url):
            return {"type": "image_url", "image_url": {"url": url}}
        case FileSource(file_id=media_id):
            return {"type": "image", "media_id": media_id}
