"""Counts what a message holds by its bytes, before it is parsed.

A message of a few hundred kilobytes may hold a hundred thousand others: parsing those takes the whole process long,
because the parser lets no other thread run meanwhile, and what it makes of them takes many times their bytes. Here the
fields are counted one after the other, up to a bound, and nothing is made of them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from service.common import errors

MAX_FIELDS = 2**16
MIN_IDS = 2**16
"""Numbers that a list may have whatever the context holds: they are dealt with in a moment."""
LIGHT = 2**14
"""Bytes from which a message is weighed: smaller ones hold too little."""
_VARINT, _LENGTH, _FIXED = 0, 2, {1: 8, 5: 4}
_DIGITS = 10
"""Bytes of a number, at most."""
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def weigh(data: bytes, descriptor: Any, max_ids: int) -> None:
    """Raises InvalidArgument for a message of the type `descriptor` with more than `MAX_FIELDS` fields, those of the
    messages in it among them, or with a list of numbers that has more than `max_ids` whatever they are. What is no
    message is left to the parser."""
    left = MAX_FIELDS
    waiting = [(0, len(data), descriptor)]
    while waiting:
        at, end, kind = waiting.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise _too_large("message", f"the message holds more than {MAX_FIELDS} fields, those of its parts too")
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
            else:  # groups, which no message here has: the parser says so
                return


def _too_large(field: str, words: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(words, reason="MESSAGE_TOO_LARGE", field=field)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and where it ends; `end` where it does not."""
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
