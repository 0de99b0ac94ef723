"""Random messages of any type, from its descriptor: mostly small, often at a boundary, sometimes sensible."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from pictures import picture

_F = FieldDescriptor
_RANGES = {
    _F.CPPTYPE_INT32: (-(2**31), 2**31 - 1), _F.CPPTYPE_UINT32: (0, 2**32 - 1),
    _F.CPPTYPE_INT64: (-(2**63), 2**63 - 1), _F.CPPTYPE_UINT64: (0, 2**64 - 1),
}  # fmt: skip
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "what is it?", "<image>", "<|im_end|>", "\0", "\N{GRINNING FACE}" * 3, "{{ 7 * 7 }}", "x" * 70)


def scalar(rng: random.Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return rng.choice([0, 1, 2, 5, 7, rng.randint(0, 300), low, high, rng.randint(low, high)])
    if kind == _F.CPPTYPE_FLOAT:
        return rng.choice([v for v in _FLOATS if abs(v) < 1e38 or v != v or v in (float("inf"), float("-inf"))])
    if kind == _F.CPPTYPE_DOUBLE:
        return rng.choice([*_FLOATS, rng.random(), rng.uniform(-3, 3)])
    if kind == _F.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == _F.CPPTYPE_ENUM:
        return rng.choice([*(v.number for v in field.enum_type.values), 99])
    if field.type == _F.TYPE_BYTES:
        return rng.choice([b"", rng.randbytes(20), picture(rng.randrange(5), (16, 16)), picture(1, (8, 8))[:-9]])
    return rng.choice(_TEXTS)


def fill(rng: random.Random, message: Any, density: float = 0.4, depth: int = 0) -> Any:
    """Sets random fields of `message`, which is returned."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() > (density if depth else 0.8) or depth > 5:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            if value.message_type is None:
                for _ in range(rng.randint(0, 3)):
                    getattr(message, field.name)[scalar(rng, key)] = scalar(rng, value)
        elif field.is_repeated:
            target = getattr(message, field.name)
            for _ in range(rng.randint(0, 3)):
                if field.message_type is not None:
                    fill(rng, target.add(), density, depth + 1)
                else:
                    target.append(scalar(rng, field))
        elif field.message_type is not None:
            fill(rng, getattr(message, field.name), density, depth + 1)
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, scalar(rng, field))
    return message
