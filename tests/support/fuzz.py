"""Random messages of any type, from its descriptor: mostly small, often at a boundary, sometimes valid."""

from __future__ import annotations

import json
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from images import png

from service.rpc.kserve_messages import message
from service.rpc.kserve_tensors import INPUTS

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
        return rng.choice([b"", rng.randbytes(20), png(rng.randrange(5), (16, 16)), png(1, (8, 8))[:-9]])
    return rng.choice(_TEXTS)


def fill(rng: random.Random, message: Any, density: float = 0.4, depth: int = 0) -> Any:
    """Sets random fields of `message` and returns it."""
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


# -- KServe ------------------------------------------------------------------------------------------------------------

_JSON = (
    None, True, 0, -1, 7, 2**31, 2**63, 2**64, 10**30, -0.0, 0.5, 1e-310, 1e300, float("inf"), float("nan"), "", "a",
    "user", "high", "\ud800", "\udc00\ud800", "\0", "text", "data:;base64,", "data:,", "https://x/y", [], {},
    [[]], [{}], {"": 1},
)  # fmt: skip
_RAW = (b"", b"\0", b"\xff\xfe", b"{", b"1" * 5000, b"-" + b"9" * 5000, b"[" * 5000, b"1e400", b"nan", b'"\\ud800"')
_PARAMETERS = (
    "priority", "timeout", "stream", "sequence_id", "sequence_start", "exclude_input_in_output", "n", "seed", "stop",
    "triton_enable_empty_final_response", "max_tokens", "temperature", "top_p", "top_k", "logit_bias", "other", "\0",
)  # fmt: skip


def json_value(rng: random.Random, depth: int = 0) -> Any:
    """A value of any JSON type, often one that occurs in chats."""
    if depth > 3 or rng.random() < 0.4:
        return rng.choice(_JSON)
    kind = rng.randrange(4)
    if kind == 0:
        return [json_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    keys = ("role", "content", "type", "text", "image_url", "url", "max_tokens", "stop", "\udfff")
    if kind == 1:
        return {rng.choice(keys): json_value(rng, depth + 1) for _ in range(rng.randint(0, 4))}
    good = {"role": "user", "content": "hi"}
    return [good, {**good, rng.choice(keys[:2]): json_value(rng, depth + 1)}] if kind == 2 else [good]


def kserve_request(rng: random.Random, model: str = "m") -> Any:
    """A ModelInferRequest that is one or a few changes away from a valid one."""
    request = message("ModelInferRequest")(model_name=model)
    wanted = {rng.choice(["text_input", "messages"]): b""}
    wanted |= {rng.choice(INPUTS)[0]: b"" for _ in range(rng.choice([0, 0, 1, 2]))}
    for name in wanted:
        kind = {n: d for n, d, _ in INPUTS}[name] if rng.random() < 0.97 else "INT32"
        tensor = request.inputs.add(
            name=name, datatype=kind, shape=rng.choice([[1], [1], [1], [1], [1, 1], [2], [-1], []])
        )
        if kind == "BOOL":
            tensor.contents.bool_contents.append(rng.random() < 0.5)
        elif name in ("messages", "sampling_parameters") and rng.random() < 0.8:
            value = json_value(rng) if name == "messages" else {
                rng.choice(_PARAMETERS): json_value(rng, 3) for _ in range(rng.randint(0, 2))
            }  # fmt: skip
            tensor.contents.bytes_contents.append(json.dumps(value).encode())
        else:
            tensor.contents.bytes_contents.append(rng.choice([b"hi", b"hi", png(1, (16, 16)), *_RAW]))
    for _ in range(rng.choice([0, 0, 1, 2])):
        parameter = request.parameters[rng.choice(_PARAMETERS)]
        field = rng.choice(parameter.DESCRIPTOR.fields)
        setattr(parameter, field.name, scalar(rng, field))
    return request
