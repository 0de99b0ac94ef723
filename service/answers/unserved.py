"""Fields of the protos that this version does not support: a request that sets one is rejected."""

from __future__ import annotations

from google.protobuf.message import Message

from service.common import errors

UNSERVED: dict[str, frozenset[str]] = {
    "ChatInput": frozenset({"tools", "tool_choice", "parallel_tool_calls"}),
    "ChatMessage": frozenset({"tool_calls", "tool_call_id"}),
}
"""Message -> its unsupported fields."""


def refuse_unserved(message: Message, path: str) -> None:
    """Raises Unimplemented if `message`, at `path` in the request, sets an unsupported field."""
    unserved = UNSERVED.get(message.DESCRIPTOR.name, frozenset())
    for field, _ in message.ListFields():
        if field.name in unserved:
            where = f"{path}.{field.name}"
            raise errors.Unimplemented(f"{where} is not served by this version", field=where)
