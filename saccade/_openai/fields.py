"""Converts paths of fields in gRPC messages to the fields of the HTTP requests from which the messages were made.

Rules are pairs of a regular expression and a replacement, applied in order; a path that no rule matches is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Rules: TypeAlias = "tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]"
PartFields: TypeAlias = Sequence[Sequence[str]]
"""For each message of a chat completion that was made from another request, the fields of its parts in that request."""

_ALL: Rules = (
    (r"^(?:sampling|chat|header)\.", ""),
    (r"^(messages\[\d+\])\.parts(\[\d+\]).*", r"\1.content\2"),
    (
        r"^((?:messages\[\d+\]\.tool_calls|tools)\[\d+\])\.(name|arguments|description|parameters)(?:_json)?$",
        r"\1.function.\2",
    ),
    (r"^tool_choice\.name$", "tool_choice.function.name"),
    (r"^tool_choice\.allowed(\[\d+\])$", r"tool_choice.allowed_tools.tools\1.function.name"),
    (r"^tool_choice\.allowed$", "tool_choice.allowed_tools.tools"),
    (r"^(?:prompt\.)?chat_template_kwargs(?:_json)?$", "chat_template_kwargs"),
)
CHAT: Rules = (*_ALL, (r"^(?:input|chat|images|videos)$", "messages"))
RESPONSE: Rules = (
    *_ALL,
    (r"^(?:messages|chat|images|videos)\b.*", "input"),
    (r"^(tools\[\d+\]|tool_choice)\.function\.", r"\1."),
    (r"^tool_choice\.allowed_tools\.(tools\[\d+\])\.function\.", r"tool_choice.\1."),
    (r"^tool_choice\.allowed_tools\.tools$", "tool_choice.tools"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"^logprobs$", "top_logprobs"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^response_format\b.*", "text.format"),
)
MESSAGES: Rules = (
    *_ALL,
    (r"^(?:input|messages(?!\[\d+\]\.content\[)|chat|images|videos)\b.*", "messages"),
    (r"^(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
    (r"^(tools\[\d+\]|tool_choice)\.function\.", r"\1."),
    (r"^stop\b", "stop_sequences"),
    (r"^enable_thinking$", "thinking.type"),
    (r"^max_reasoning_tokens$", "thinking.budget_tokens"),
    (r"^reasoning_effort$", "output_config.effort"),
    (r"^response_format\b.*", "output_config.format"),
)
"""Of Anthropic's messages. Which of them is at fault is told by `part_rules` alone: a result of a tool is a message of
its own here."""
BATCH: Rules = (*_ALL, (r"^(?:input_name|size_bytes|chunk)$", "input_file_id"))
DETOKENIZE: Rules = (("^token_ids", "tokens"),)


def chat_rules(body: Mapping[str, Any]) -> Rules:
    """The rules for a chat completion: two fields of gRPC messages have other names in it."""
    longest = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return (*CHAT, ("^max_tokens$", longest), ("^logprobs$", "top_logprobs"))


def response_rules(tools: Sequence[str]) -> Rules:
    """The rules for a response. `tools`: the field of each function; those of namespaces are within other tools."""
    return (*RESPONSE, *((rf"^tools\[{i}\]", path) for i, path in enumerate(tools) if path != f"tools[{i}]"))


def part_rules(parts: PartFields, rules: Rules) -> Rules:
    """The rules for a request from which a chat completion was made. `rules`: its others."""

    def field(place: re.Match[str]) -> str:
        message, part = int(place[1]), int(place[2])
        return parts[message][part] if message < len(parts) and part < len(parts[message]) else "messages"

    return (*_ALL, (r"^messages\[(\d+)\]\.content\[(\d+)\].*", field), *rules)


def prompt_rules(name: str) -> Rules:
    """The rules for a request whose prompt (text or token ids) is in the field `name`."""
    return (*_ALL, (r"^(?:input|tokens|prompt)(?:\..*)?$", name), (r"^prompt_logprobs$", "logprobs"))


def field_named(path: str, rules: Rules) -> str:
    """The field of the HTTP request for a path in the message."""
    for pattern, replacement in rules:
        path = re.sub(pattern, replacement, path)
    return path
