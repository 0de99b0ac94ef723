"""Counts the fields of a message from its bytes, before it is parsed.

A message of a few hundred kilobytes may contain a hundred thousand fields. Parsing it would block the whole process,
because the parser holds the GIL, and the parsed objects would take many times the memory of its bytes. Here, fields are
counted up to a limit without creating objects.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from service.common import errors

MAX_FIELDS = 2**16
MIN_IDS = 2**16
"""Number of elements that a list may always have, because such a list is processed quickly."""
LIGHT = 2**14
"""Size in bytes from which the fields of messages are counted: smaller messages cannot contain too many."""
_VARINT, _LENGTH, _FIXED = 0, 2, {1: 8, 5: 4}
_DIGITS = 10
"""Largest size of a varint, in bytes."""
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def weigh(data: bytes, descriptor: Any, max_ids: int) -> None:
    """Raises InvalidArgument for a message of the type `descriptor` with more than `MAX_FIELDS` fields, nested messages
    included, or with a list of more than `max_ids` numbers. Invalid messages are left to the parser."""
    left = MAX_FIELDS
    waiting = [(0, len(data), descriptor)]
    while waiting:
        at, end, kind = waiting.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise _too_large("message", f"the message has more than {MAX_FIELDS} fields, nested ones included")
            tag, at = _varint(data, at, end)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(data, at, end)
            elif wire == _LENGTH:
                size, at = _varint(data, at, end)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    waiting.append((at, min(at + size, end), field.message_type))
                elif field is not None and field.type not in _TEXTS and size > _DIGITS * max_ids:
                    words = f"{field.name} has {size} bytes, more than {max_ids} numbers can take"
                    raise _too_large(field.name, words)
                at += size
            elif wire in _FIXED:
                at += _FIXED[wire]
            else:  # groups, which no message of this server has: the parser raises the error
                return


def _too_large(field: str, words: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(words, reason="MESSAGE_TOO_LARGE", field=field)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A varint and the offset after it; `end` if it is truncated."""
    value = 0
    for shift in range(0, 7 * _DIGITS, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return 0, end
