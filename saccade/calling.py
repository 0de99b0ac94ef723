"""Tools that a model may call, and the calls that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade._core.json_nesting import answered_json


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask its caller to run."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | type[Any] | None = None
    """The JSON schema of the arguments, of type object, or a Pydantic model class; None: it has no arguments."""
    strict: bool = False
    """Enforce the schema with `tool_choice="auto"`, too. With "required" or a tool's name it is always enforced."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """A JSON object as text. It is incomplete if the answer ended within the call; `finish_reason` is then not
    "tool_calls"."""

    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError if they are incomplete, or nested more than 128 levels deep."""
        value = answered_json(self.arguments)
        if not isinstance(value, dict):
            raise ValueError(f"the arguments are a {type(value).__name__}, not an object")
        return value


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a call. The first part of each call has its id and its name."""

    index: int
    """The index of the call within its sample, from 0."""
    arguments: str
    id: str = ""
    name: str = ""
