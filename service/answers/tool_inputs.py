"""Converts the tools, tool calls and tool results of requests from messages. Each result must belong to one call before
it; other histories are rejected."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from saccade.v1 import inference_pb2, types_pb2
from service.answers.bounds import check_length
from service.answers.json_values import answered_object, json_object
from service.common import errors
from service.common.types import Message, Tool, ToolCall, ToolUse

MAX_TOOLS = 128
MAX_TOOL_NAME = 128
MAX_TOOL_TEXT = 2**17
"""Largest number of characters of the descriptions and schemas of all tools of a request together."""
MAX_CALLS = 1024
"""Largest number of calls of one message in the history."""
MAX_ARGUMENTS = 2**22
"""Largest number of characters of the arguments of one call in the history: an answer of a million tokens."""
MAX_CALL_ID = 256
_MODES = {
    types_pb2.TOOL_MODE_UNSPECIFIED: "auto", types_pb2.TOOL_MODE_AUTO: "auto", types_pb2.TOOL_MODE_NONE: "none",
    types_pb2.TOOL_MODE_REQUIRED: "required",
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


def tool_use_from_proto(chat: inference_pb2.ChatInput) -> ToolUse | None:
    """The tools of a request; None if there are none. Raises InvalidArgument."""
    _check_count("chat.tools", len(chat.tools), MAX_TOOLS)
    total = sum(len(tool.description) + len(tool.parameters_json) for tool in chat.tools)
    if total > MAX_TOOL_TEXT:
        raise errors.InvalidArgument(
            f"chat.tools has {total} characters; at most {MAX_TOOL_TEXT} are allowed", field="chat.tools"
        )
    tools = [_tool(tool, f"chat.tools[{i}]") for i, tool in enumerate(chat.tools)]
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise errors.InvalidArgument(
                f"chat.tools[{i}].name is {name!r}, which is also the name of chat.tools[{names.index(name)}]",
                field=f"chat.tools[{i}].name",
            )
    choice, allowed = _choice(chat.tool_choice, names)
    if not tools:
        return None
    parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return ToolUse(tuple(tools), choice, allowed, parallel)


def _tool(tool: types_pb2.Tool, field: str) -> Tool:
    if len(tool.name) > MAX_TOOL_NAME or not _NAME.fullmatch(tool.name):
        raise errors.InvalidArgument(
            f"{field}.name has {len(tool.name)} characters: {tool.name[:50]!r}; it must have from 1 to "
            f"{MAX_TOOL_NAME}, and only letters, digits and _ . : / -",
            field=f"{field}.name",
        )
    parameters: dict[str, Any] = {}
    if tool.parameters_json:
        where = f"{field}.parameters_json"
        parameters = json_object(where, tool.parameters_json, MAX_TOOL_TEXT)
        if parameters.get("type", "object") != "object":
            raise errors.InvalidArgument(
                f"{where} has the type {str(parameters['type'])[:50]!r}; it must be 'object'", field=where
            )
        if not isinstance(parameters.get("properties", {}), dict):
            raise errors.InvalidArgument(f"{where}: properties must be an object", field=where)
    return Tool(tool.name, tool.description, parameters, tool.strict)


def _choice(choice: types_pb2.ToolChoice, names: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The mode, and the names of the only tools that may be called; empty: any."""
    field = "chat.tool_choice"
    _check_count(f"{field}.allowed", len(choice.allowed), MAX_TOOLS)
    if choice.allowed and choice.mode not in (types_pb2.TOOL_MODE_AUTO, types_pb2.TOOL_MODE_REQUIRED):
        kind = choice.WhichOneof("kind")
        given = f"{field}.{kind} is {getattr(choice, kind)!r}" if kind else "no mode is set"
        raise errors.InvalidArgument(
            f"{field}.allowed needs the mode auto (1) or required (3); {given[:200]}", field=f"{field}.allowed"
        )
    for i, allowed in enumerate(choice.allowed):
        if allowed not in names:
            raise errors.InvalidArgument(
                f"{field}.allowed[{i}] is {allowed[:100]!r}, which is none of the {len(names)} tools",
                field=f"{field}.allowed[{i}]",
            )
    match choice.WhichOneof("kind"):
        case "name":
            if choice.name not in names:
                raise errors.InvalidArgument(
                    f"{field}.name is {choice.name[:100]!r}, which is none of the {len(names)} tools",
                    field=f"{field}.name",
                )
            return "required", (choice.name,)
        case "mode":
            if choice.mode not in _MODES:
                raise errors.InvalidArgument(
                    f"{field}.mode is {choice.mode}; it must be auto (1), none (2) or required (3)",
                    field=f"{field}.mode",
                )
            if choice.mode == types_pb2.TOOL_MODE_REQUIRED and not names:
                raise errors.InvalidArgument(f"{field} requires a call, but there are no tools", field=field)
            return _MODES[choice.mode], tuple(choice.allowed)
    return "auto", ()


def calls_from_proto(message: types_pb2.ChatMessage, field: str) -> tuple[ToolCall, ...]:
    """The calls of one message. Raises InvalidArgument."""
    if message.tool_calls and message.role != types_pb2.ROLE_ASSISTANT:
        raise errors.InvalidArgument(
            f"{field}.tool_calls is set, but the role is not assistant",
            field=f"{field}.tool_calls",
        )
    _check_count(f"{field}.tool_calls", len(message.tool_calls), MAX_CALLS)
    return tuple(_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls))


def _call(call: types_pb2.ToolCall, field: str) -> ToolCall:
    check_length(f"{field}.id", call.id, MAX_CALL_ID, least=0)
    check_length(f"{field}.name", call.name, MAX_TOOL_NAME)
    return ToolCall(call.id, call.name, answered_object(f"{field}.arguments", call.arguments or "{}", MAX_ARGUMENTS))


class ToolHistory:
    """The calls of a conversation so far; finds the call of each result."""

    def __init__(self) -> None:
        self._open: list[ToolCall] = []
        """Calls without a result, in order."""

    def add(self, calls: Sequence[ToolCall], field: str) -> None:
        """Adds the calls of the assistant's next message. Some clients use the same ids in each turn. Raises
        InvalidArgument."""
        for i, call in enumerate(calls):
            if call.id and any(call.id == other.id for other in self._open):
                where = f"{field}.tool_calls[{i}].id"
                raise errors.InvalidArgument(
                    f"{where} is {call.id[:100]!r}, which is also the id of an earlier call without a result",
                    field=where,
                )
            self._open.append(call)

    def answer(self, message: types_pb2.ChatMessage, field: str) -> ToolCall | None:
        """The call whose result the next message contains: the one with the message's call id, or, if it has none, the
        first without a result. None if the message is not from a tool. Raises InvalidArgument."""
        if message.role != types_pb2.ROLE_TOOL:
            if message.tool_call_id:
                raise errors.InvalidArgument(
                    f"{field}.tool_call_id is set, but the role is not tool", field=f"{field}.tool_call_id"
                )
            return None
        wanted = message.tool_call_id
        found = next((call for call in self._open if not wanted or call.id == wanted), None)
        if found is None:
            fault = "there is no earlier call without a result"
            if wanted:
                fault = f"none of the {len(self._open)} earlier calls without a result has the id {wanted[:100]!r}"
            raise errors.InvalidArgument(
                f"{field} is the result of a tool, but {fault}",
                field=f"{field}.tool_call_id",
            )
        self._open.remove(found)
        return found


def in_order_of_calls(messages: Sequence[Message]) -> list[int]:
    """Indices of `messages` in an order in which results are in the same order as the calls of the assistant's message
    before them. Chat templates do not print ids, so the model can match results with calls only by their order."""
    order, ranks = list(range(len(messages))), dict[int, int]()
    begin = 0
    for i, message in enumerate(messages):
        if message.answered is None:
            ranks = {id(call): rank for rank, call in enumerate(message.tool_calls)}
            begin = i + 1
        elif i + 1 == len(messages) or messages[i + 1].answered is None:
            order[begin : i + 1] = sorted(order[begin : i + 1], key=lambda at: ranks.get(id(messages[at].answered), -1))
    return order


def tool_arguments(use: ToolUse) -> list[dict[str, Any]]:
    """The tools for the chat template, in the form that published templates read."""
    made = []
    for tool in use.tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
        made.append({"type": "function", "function": function})
    return made


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise errors.InvalidArgument(f"{field} has {count} entries; at most {most} are allowed", field=field)
