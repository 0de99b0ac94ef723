"""Tools that a model may call, and its calls."""

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
    """A JSON schema of its arguments, an object, or a Pydantic model class; None: it has no arguments."""
    strict: bool = False
    """Whether the schema is also enforced for calls that the model chooses to make."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    id: str
    name: str
    arguments: str
    """JSON of an object. It is incomplete if the answer broke off in the call; `finish_reason` is not `tool_calls`
    then."""

    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError if they are incomplete, or nested too deep."""
        value = answered_json(self.arguments)
        if not isinstance(value, dict):
            raise ValueError(f"the arguments are a {type(value).__name__}, not an object")
        return value


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of a call. The first part of each call has its id and its name."""

    index: int
    """Counts the calls of the sample from 0."""
    arguments: str
    id: str = ""
    name: str = ""
