"""Converts `tools=`, `tool_choice=` and the tool calls of earlier messages, as `saccade.Tool` and `saccade.ToolCall` or
in OpenAI's form, to fields of the message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from saccade._core.formats import json_text
from saccade._core.ranges import check_flag, check_string, check_text
from saccade.errors import InvalidArgument
from saccade.types import Tool, ToolCall
from saccade.v1 import inference_pb2, types_pb2

ToolInput: TypeAlias = Tool | Mapping[str, Any]
ToolChoice: TypeAlias = str | Mapping[str, Any]
"""`auto`, `none`, `required`, the name of a tool, or OpenAI's `{"type": "function", "function": {"name": ...}}` and
`{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`."""

MODES = {
    "auto": types_pb2.TOOL_MODE_AUTO,
    "none": types_pb2.TOOL_MODE_NONE,
    "required": types_pb2.TOOL_MODE_REQUIRED,
}
_KEYS = {"name", "description", "parameters", "strict"}


def set_tools(
    chat: inference_pb2.ChatInput, tools: Iterable[ToolInput], choice: ToolChoice | None, parallel: bool | None
) -> None:
    """Adds the tools and the choice to a conversation. Raises InvalidArgument naming the argument."""
    if isinstance(tools, Mapping | str | Tool) or not isinstance(tools, Iterable):
        raise InvalidArgument(f"tools: expected a list of tools, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        chat.tools.append(_tool_message(tool, f"tools[{i}]"))
    if choice is not None:
        _set_choice(chat.tool_choice, choice, [tool.name for tool in chat.tools])
    if parallel is not None:
        chat.parallel_tool_calls = check_flag("parallel_tool_calls", parallel)


def _set_choice(message: types_pb2.ToolChoice, choice: ToolChoice, names: Sequence[str]) -> None:
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        _set_allowed(message, choice, names)
        return
    if isinstance(choice, Mapping):
        name = _function(choice, "tool_choice").get("name")
        if not isinstance(name, str):
            raise InvalidArgument("tool_choice: expected the name of a function")
    elif not isinstance(choice, str):
        raise InvalidArgument(f"tool_choice: expected a string or a dict, got {type(choice).__name__}")
    elif choice in MODES:
        if choice == "required" and not names:
            raise InvalidArgument("tool_choice: required needs one tool or more, got none")
        message.mode = MODES[choice]
        return
    else:
        name = choice
    if name not in names:
        raise InvalidArgument(
            f"tool_choice: {name!r} is neither auto, none, required nor one of the {len(names)} tools"
        )
    message.name = name


def _set_allowed(message: types_pb2.ToolChoice, choice: Mapping[str, Any], names: Sequence[str]) -> None:
    """Sets a choice among some of the tools, in the form of chat completions or in that of responses."""
    inner = choice.get("allowed_tools", choice)
    if not isinstance(inner, Mapping):
        raise InvalidArgument(f"tool_choice.allowed_tools: expected a dict, got {type(inner).__name__}")
    if inner.get("mode") not in ("auto", "required"):
        raise InvalidArgument(f"tool_choice.mode: expected auto or required, got {inner.get('mode')!r}")
    tools = inner.get("tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise InvalidArgument("tool_choice.tools: expected a list of at least one tool")
    message.mode = MODES[inner["mode"]]
    for i, tool in enumerate(tools):
        name = _function(tool, f"tool_choice.tools[{i}]").get("name")
        if name not in names:
            raise InvalidArgument(f"tool_choice.tools[{i}]: {name!r} is none of the {len(names)} tools")
        message.allowed.append(name)


def add_calls(message: types_pb2.ChatMessage, calls: Any, name: str) -> None:
    """Adds the tool calls of an assistant message. Their arguments may be JSON text or the object itself."""
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidArgument(f"{name}: expected a list of calls, got {type(calls).__name__}")
    for i, call in enumerate(calls):
        where = f"{name}[{i}]"
        if isinstance(call, ToolCall):
            fields: Mapping[str, Any] = {"id": call.id, "name": call.name, "arguments": call.arguments}
        else:
            id = call.get("id") if isinstance(call, Mapping) else None
            fields = {"id": id or "", **_function(call, where)}
        arguments = fields.get("arguments", "{}")
        if isinstance(arguments, Mapping):
            arguments = json_text(arguments, f"{where}.arguments")
        message.tool_calls.add(
            id=check_string(f"{where}.id", fields["id"]), name=check_string(f"{where}.name", fields.get("name")),
            arguments=check_string(f"{where}.arguments", arguments),
        )  # fmt: skip


def _tool_message(tool: Any, name: str) -> types_pb2.Tool:
    if isinstance(tool, Tool):
        fields: Mapping[str, Any] = {
            "name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict,
        }  # fmt: skip
    else:
        fields = _function(tool, name)
    if extra := sorted(map(str, fields.keys() - _KEYS)):
        raise InvalidArgument(f"{name}: unknown keys {', '.join(extra)}; known are {', '.join(sorted(_KEYS))}")
    if not isinstance(fields.get("name"), str) or not fields["name"]:
        raise InvalidArgument(f"{name}.name: expected a string, got {fields.get('name')!r}")
    made = types_pb2.Tool(name=check_text(f"{name}.name", fields["name"]))
    made.strict = check_flag(f"{name}.strict", fields.get("strict") or False)
    if (description := fields.get("description")) is not None:
        made.description = check_string(f"{name}.description", description)
    if (parameters := fields.get("parameters")) is not None:
        schema = getattr(parameters, "model_json_schema", None)
        parameters = schema() if schema is not None else parameters
        if not isinstance(parameters, Mapping):
            raise InvalidArgument(
                f"{name}.parameters: expected a JSON schema or a Pydantic model class, got {type(parameters).__name__}"
            )
        made.parameters_json = json_text(parameters, f"{name}.parameters")
    return made


def _function(value: Any, name: str) -> Mapping[str, Any]:
    """The inner part of `{"type": "function", "function": {...}}`, or the value itself."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name}: expected a dict, got {type(value).__name__}")
    if value.get("type", "function") != "function":
        raise InvalidArgument(f"{name}.type: expected function, got {value['type']!r}")
    inner = value.get("function")
    if inner is None:
        return {key: item for key, item in value.items() if key not in ("type", "function")}
    if not isinstance(inner, Mapping):
        raise InvalidArgument(f"{name}.function: expected a dict, got {type(inner).__name__}")
    return inner
