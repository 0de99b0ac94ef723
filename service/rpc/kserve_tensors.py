"""KServe's tensors: their definitions, reading inputs and writing outputs.

Inputs (BYTES unless stated otherwise; exactly one of the first two is needed, the others are optional):
    text_input [1]           a prompt, rendered with the chat template
    messages [1]             a JSON list of chat messages in OpenAI's format; videos are parts of the type video_url
    image [-1]               encoded images, in the order of the prompt's image parts
    image_url [-1]           URLs of further images, which follow those of `image`; data URLs always work
    stream BOOL [1]          in a streaming call: one response for each piece of the answer
    tools [1]                a JSON list of tools in OpenAI's format; needs `messages`
    sampling_parameters [1]  a JSON object of fields of saccade.v1.SamplingParams, except `n`, `logprobs` and
                             `prompt_logprobs`
    exclude_input_in_output BOOL [1]  false: text_output begins with text_input; not with streaming or `messages`

The JSON of an input has at most 65,536 objects and arrays and 262,144 values and keys.

Fields of `sampling_parameters`, `stream` and `exclude_input_in_output` may also be request parameters. So may
`enable_thinking` (bool), `reasoning_effort` (string), `continue_final_message` (bool), `tool_choice` (string) and
`parallel_tool_calls` (bool).

Outputs: text_output BYTES [1], token_ids INT32 [-1], finish_reason BYTES [1], reasoning BYTES [1] (the model's
reasoning before text_output; empty for most models), tool_calls BYTES [1] (a JSON list of `{"index", "id", "name",
"arguments"}`; in a stream, of parts of calls). Token counts are response parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Any

from service.answers.weigh import MAX_FIELDS
from service.common import errors

MAX_DIMENSIONS = 8
INPUTS = (
    ("text_input", "BYTES", [1]), ("messages", "BYTES", [1]), ("image", "BYTES", [-1]), ("image_url", "BYTES", [-1]),
    ("tools", "BYTES", [1]),
    ("stream", "BOOL", [1]), ("sampling_parameters", "BYTES", [1]), ("exclude_input_in_output", "BOOL", [1]),
)  # fmt: skip
OUTPUTS = (
    ("text_output", "BYTES", [1]), ("token_ids", "INT32", [-1]), ("finish_reason", "BYTES", [1]),
    ("reasoning", "BYTES", [1]), ("tool_calls", "BYTES", [1]),
)  # fmt: skip


def read_tensors(request: Any) -> dict[str, list[Any]]:
    """Input tensors by name, flat: bytes for BYTES, bool for BOOL. Raises InvalidArgument naming the tensor."""
    known = {name: datatype for name, datatype, _ in INPUTS}
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise errors.InvalidArgument(
            f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs", field="raw_input_contents"
        )
    tensors: dict[str, list[Any]] = {}
    for index, tensor in enumerate(request.inputs):
        where = f"inputs[{index}]"
        if tensor.name not in known or tensor.name in tensors:
            raise errors.InvalidArgument(
                f"{where}: no input {tensor.name!r}, or it is given twice; inputs are {', '.join(known)}", field=where
            )
        if tensor.datatype != known[tensor.name]:
            raise errors.InvalidArgument(
                f"{tensor.name} is {tensor.datatype!r}; it must be {known[tensor.name]}", field=where
            )
        if "shared_memory_region" in tensor.parameters:
            raise errors.Unimplemented(f"{tensor.name}: shared memory is not supported; send the bytes", field=where)
        if raw and tensor.HasField("contents"):
            raise errors.InvalidArgument(f"{tensor.name} has contents as well as raw_input_contents", field=where)
        count = _count(tensor, where)
        if not raw:
            contents = tensor.contents
            values: list[Any] = list(contents.bool_contents if tensor.datatype == "BOOL" else contents.bytes_contents)
        elif tensor.datatype == "BOOL":
            values = [b != 0 for b in raw[index][: count + 1]]
        else:
            values = _split(raw[index], tensor.name, count + 1)
        if count != len(values):
            found = f"more than {count}" if len(values) > count else str(len(values))
            raise errors.InvalidArgument(
                f"{tensor.name} has the shape {list(tensor.shape)}, but {found} elements", field=where
            )
        tensors[tensor.name] = values
    return tensors


def _count(tensor: Any, where: str) -> int:
    """Elements that the tensor has by its shape. Raises InvalidArgument."""
    if len(tensor.shape) > MAX_DIMENSIONS or any(d < 0 for d in tensor.shape):
        raise errors.InvalidArgument(
            f"{tensor.name} has the shape {list(tensor.shape[:MAX_DIMENSIONS])} of {len(tensor.shape)} dimensions; "
            f"at most {MAX_DIMENSIONS} are allowed, each at least 0", field=where,
        )  # fmt: skip
    # A raw tensor is one field of the message, however many elements it has, so nothing else has counted the elements.
    if (count := prod(tensor.shape)) > MAX_FIELDS:
        raise errors.InvalidArgument(
            f"{tensor.name} has {count} elements; at most {MAX_FIELDS} are allowed", reason="MESSAGE_TOO_LARGE",
            field=where,
        )  # fmt: skip
    return count


def _split(raw: bytes, name: str, most: int) -> list[bytes]:
    """The first `most` elements of a BYTES tensor: each is its length as four little-endian bytes, then itself."""
    values: list[bytes] = []
    at = 0
    while at < len(raw) and len(values) < most:
        if at + 4 > len(raw) or at + 4 + (size := struct.unpack_from("<I", raw, at)[0]) > len(raw):
            raise errors.InvalidArgument(f"{name}: the {len(raw)} bytes of the tensor end inside an element")
        values.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return values


def write_tensor(response: Any, name: str, values: str | Sequence[int]) -> None:
    """Adds the output `name` to a ModelInferResponse: a text as BYTES [1], ids as INT32 [-1]."""
    if isinstance(values, str):
        data = values.encode()
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        response.raw_output_contents.append(struct.pack("<I", len(data)) + data)
    else:
        response.outputs.add(name=name, datatype="INT32", shape=[len(values)])
        response.raw_output_contents.append(struct.pack(f"<{len(values)}i", *values))
