"""KServe v2 with Triton's extensions, `inference.GRPCInferenceService`: unmodified Triton clients can ask this server.

Inputs (BYTES unless said otherwise; all but the first two are optional):
    text_input [1]           a prompt, put through the chat template; or
    messages [1]             a JSON list of chat messages, as OpenAI has them
    image [-1]               encoded pictures, in the order of the prompt's image parts
    image_url [-1]           the same as URLs, after those of `image`; data URLs always work
    stream BOOL [1]          on a stream: one response for each piece of the answer
    sampling_parameters [1]  a JSON object of fields of saccade.v1.SamplingParams
    exclude_input_in_output BOOL [1]  false: text_output begins with text_input; not on streams, not with messages
The same fields may also be request parameters. Outputs: text_output BYTES [1], token_ids INT32 [-1], finish_reason
BYTES [1]; the token counts are response parameters.

A streamed answer ends with a response that has no text and says why it ended. `triton_final_response` is true on that
one, or, where the request asks for `triton_enable_empty_final_response`, on an empty one behind it.

The messages live in a descriptor pool of their own: in the default pool their names belong to whichever package comes
first, and a client library of the same process could then not be imported.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import re
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, json_format
from google.protobuf.descriptor_pool import Default, DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from saccade.v1 import inference_pb2, model_pb2, types_pb2
from service.answers import convert
from service.answers.calls import Calls
from service.common import errors
from service.common.limits import ByteBudget
from service.common.types import Delta, Finished, Started
from service.rpc.servicer import read
from service.telemetry.call_context import current_call, set_current_call

SERVICE = "inference.GRPCInferenceService"
VERSION = "1"
MAX_OPEN = 256
"""Requests of one stream that are worked on at a time; the next is read when one has ended."""
LONGEST_TIMEOUT = 366 * 86400.0
"""Seconds; a longer one is cut to it, so that no clock overflows."""
EXTENSIONS = ("model_repository", "model_configuration", "statistics", "parameters", "binary_tensor_data")
INPUTS = (
    ("text_input", "BYTES", [1]), ("messages", "BYTES", [1]), ("image", "BYTES", [-1]), ("image_url", "BYTES", [-1]),
    ("stream", "BOOL", [1]), ("sampling_parameters", "BYTES", [1]), ("exclude_input_in_output", "BOOL", [1]),
)  # fmt: skip
OUTPUTS = (("text_output", "BYTES", [1]), ("token_ids", "INT32", [-1]), ("finish_reason", "BYTES", [1]))
_OUR_PARAMETERS = {"triton_enable_empty_final_response", "timeout", "priority", "sequence_id", "sequence_start",
                   "sequence_end", "stream", "exclude_input_in_output"}  # fmt: skip
_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - {"n"}
_ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}


def _load_pool() -> DescriptorPool:
    pool = DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString((Path(__file__).parent / "kserve.binpb").read_bytes())
    for file in files.file:
        pool.Add(file)
    return pool


_pool = _load_pool()


def message(name: str) -> Any:
    """The class of `inference.NAME`."""
    return GetMessageClass(_pool.FindMessageTypeByName(f"inference.{name}"))


def reflection_pool(services: list[str]) -> DescriptorPool:
    """A pool that describes `services` of the default pool and KServe's."""
    pool = _load_pool()
    seen: set[str] = set()

    def add(file: Any) -> None:
        if file.name in seen:
            return
        seen.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        pool.AddSerializedFile(file.serialized_pb)

    for name in set(services) - {SERVICE}:
        with contextlib.suppress(KeyError):
            add(Default().FindFileContainingSymbol(name))
    return pool


# -- tensors -----------------------------------------------------------------------------------------------------------


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
                f"{where}: no input {tensor.name!r}, or there twice; inputs are {', '.join(known)}", field=where
            )
        if tensor.datatype != known[tensor.name]:
            raise errors.InvalidArgument(
                f"{tensor.name} is {tensor.datatype!r}; it must be {known[tensor.name]}", field=where
            )
        if "shared_memory_region" in tensor.parameters:
            raise errors.Unimplemented(f"{tensor.name}: shared memory is not served; send the bytes", field=where)
        if raw and tensor.HasField("contents"):
            raise errors.InvalidArgument(f"{tensor.name} has contents beside raw_input_contents", field=where)
        if tensor.datatype == "BOOL":
            values: list[Any] = [b != 0 for b in raw[index]] if raw else list(tensor.contents.bool_contents)
        else:
            values = _split(raw[index], tensor.name) if raw else list(tensor.contents.bytes_contents)
        if any(d < 0 for d in tensor.shape) or prod(tensor.shape) != len(values):
            raise errors.InvalidArgument(
                f"{tensor.name} has the shape {list(tensor.shape)} and {len(values)} elements", field=where
            )
        tensors[tensor.name] = values
    return tensors


def _split(raw: bytes, name: str) -> list[bytes]:
    """Elements of a BYTES tensor: each is its length as four little-endian bytes, then itself."""
    values, at = [], 0
    while at < len(raw):
        if at + 4 > len(raw) or at + 4 + (size := struct.unpack_from("<I", raw, at)[0]) > len(raw):
            raise errors.InvalidArgument(f"{name}: the {len(raw)} bytes of the tensor end inside an element")
        values.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    return values


def _bytes_tensor(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<I", len(data)) + data


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass
class Question:
    """A ModelInferRequest as we understand it."""

    request: inference_pb2.GenerateRequest
    outputs: tuple[str, ...]
    stream: bool
    empty_final: bool
    timeout: float | None
    prefix: str = ""
    """Of the answer's text: the prompt, where it is asked for."""


def read_request(request: Any) -> Question:
    """Raises InvalidArgument."""
    tensors = read_tensors(request)
    parameters = {name: _parameter(name, value) for name, value in request.parameters.items()}
    generate = inference_pb2.GenerateRequest(sampling=_sampling(tensors, parameters))
    _fill_prompt(generate, tensors)
    if parameters.get("sequence_id"):
        raise errors.InvalidArgument("stateful sequences are not served", field="parameters.sequence_id")
    # Triton counts from 1, the most urgent; 0 is its default
    generate.priority = -min(_count(parameters, "priority"), 2**31 - 1)
    wanted = tuple(output.name for output in request.outputs) or tuple(name for name, _, _ in OUTPUTS)
    if unknown := sorted(set(wanted) - {name for name, _, _ in OUTPUTS}):
        raise errors.InvalidArgument(
            f"no output {unknown[0]!r}; outputs are {', '.join(n for n, _, _ in OUTPUTS)}", field="outputs"
        )
    timeout = min(_count(parameters, "timeout") / 1e6, LONGEST_TIMEOUT)
    stream = _flag(tensors, parameters, "stream", False)
    return Question(
        generate, wanted, stream, _flag({}, parameters, "triton_enable_empty_final_response", False), timeout or None,
        _prefix(tensors, parameters, stream),
    )  # fmt: skip


def _count(parameters: dict[str, Any], name: str) -> int:
    """A whole number from 0; 0 where it is not there. Raises InvalidArgument."""
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise errors.InvalidArgument(
            f"{name} is {str(value)[:100]!r}; it must be a whole number from 0", field=f"parameters.{name}"
        )
    return value


def _flag(tensors: dict[str, list[Any]], parameters: dict[str, Any], name: str, default: bool) -> bool:
    """Of a BOOL input, else of a parameter. Raises InvalidArgument."""
    value = _single(tensors, name) if name in tensors else parameters.get(name, default)
    if not isinstance(value, bool):
        raise errors.InvalidArgument(
            f"{name} is {str(value)[:100]!r}; it must be true or false", field=f"parameters.{name}"
        )
    return value


def _prefix(tensors: dict[str, list[Any]], parameters: dict[str, Any], stream: bool) -> str:
    """What `exclude_input_in_output` = false puts before the answer, as Triton's vLLM backend does. Here the input is
    left out unless a request says otherwise. Raises InvalidArgument."""
    name = "exclude_input_in_output"
    if _flag(tensors, parameters, name, True):
        return ""
    if stream or "text_input" not in tensors:
        why = "on a stream" if stream else "with messages"
        raise errors.InvalidArgument(f"{name} cannot be false {why}", field=name)
    return _text(_single(tensors, "text_input"), "text_input")


def _parameter(name: str, value: Any) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise errors.InvalidArgument(f"parameter {name!r} has no value", field=f"parameters.{name}")
    return getattr(value, kind)


def _sampling(tensors: dict[str, list[Any]], parameters: dict[str, Any]) -> types_pb2.SamplingParams:
    values: dict[str, Any] = {}
    if "sampling_parameters" in tensors:
        parsed = _json(_single(tensors, "sampling_parameters"), "sampling_parameters")
        if not isinstance(parsed, dict):
            raise errors.InvalidArgument("sampling_parameters must be a JSON object", field="sampling_parameters")
        values |= parsed
    values |= {name: value for name, value in parameters.items() if name not in _OUR_PARAMETERS}
    sampling = types_pb2.SamplingParams()
    for name, value in values.items():
        if name not in _SAMPLING:
            raise errors.InvalidArgument(
                f"no parameter {name!r}; sampling parameters are {', '.join(sorted(_SAMPLING))}",
                field=f"parameters.{name}"[:100],
            )  # fmt: skip
        if name in ("stop", "stop_token_ids") and not isinstance(value, list):
            value = [value]
        try:
            json_format.ParseDict({name: value}, sampling)
        except (json_format.ParseError, ValueError, TypeError):
            raise errors.InvalidArgument(f"{name} cannot be {str(value)[:100]!r}", field=f"parameters.{name}") from None
    return sampling


def _single(tensors: dict[str, list[Any]], name: str) -> Any:
    values = tensors[name]
    if len(values) != 1:
        raise errors.InvalidArgument(f"{name} has {len(values)} elements; it must have one", field=name)
    return values[0]


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise errors.InvalidArgument(
            f"{name} is not UTF-8: byte {error.start} is {data[error.start]}", field=name
        ) from None


def _json(data: bytes, name: str) -> Any:
    text = _text(data, name)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, or a number of thousands of digits
        raise errors.InvalidArgument(f"{name} is not JSON: {str(error)[:100]}", field=name) from None
    if _SURROGATE.search(text) and not _is_unicode(value):
        raise errors.InvalidArgument(f"{name} has a \\u escape that is half a character", field=name)
    return value


_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)


def _is_unicode(value: Any) -> bool:
    """Whether every string in a JSON value can be written as UTF-8: two halves of a pair can, one alone cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _fill_prompt(generate: inference_pb2.GenerateRequest, tensors: dict[str, list[Any]]) -> None:
    images = [types_pb2.Image(data=data) for data in tensors.get("image", ())]
    images += [_image_from_url(_text(url, "image_url")) for url in tensors.get("image_url", ())]
    if ("text_input" in tensors) == ("messages" in tensors):
        raise errors.InvalidArgument("one of text_input and messages must be there", field="inputs")
    if "text_input" in tensors:
        generate.prompt.text = _text(_single(tensors, "text_input"), "text_input")
        generate.prompt.images.extend(images)
        return
    entries = _json(_single(tensors, "messages"), "messages")
    if not isinstance(entries, list):
        raise errors.InvalidArgument("messages must be a JSON list", field="messages")
    waiting = iter(images)
    for index, entry in enumerate(entries):
        generate.chat.messages.append(_chat_message(entry, f"messages[{index}]", waiting))
    if list(waiting):
        raise errors.InvalidArgument("there are more images than image parts in messages", field="image")


def _image_from_url(url: str) -> types_pb2.Image:
    if not url.startswith("data:"):
        return types_pb2.Image(uri=url)
    head, comma, data = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError
        return types_pb2.Image(data=base64.b64decode(data, validate=True))
    except (ValueError, binascii.Error):
        raise errors.InvalidArgument("an image_url is a data URL without valid base64", field="image_url") from None


def _chat_message(entry: Any, where: str, images: Any) -> types_pb2.ChatMessage:
    role = entry.get("role") if isinstance(entry, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise errors.InvalidArgument(f"{where} needs a role out of {', '.join(_ROLES)}", field=where)
    content = entry.get("content")
    if content is not None and not isinstance(content, str | list):
        raise errors.InvalidArgument(f"{where} has a content that is neither text nor a list of parts", field=where)
    chat = types_pb2.ChatMessage(role=types_pb2.Role.Name(_ROLES[role]))
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        match part:
            case {"type": "text", "text": str(text)}:
                chat.parts.add(text=text)
            case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
                chat.parts.add(image=_image_from_url(url))
            case {"type": "image"}:
                if (image := next(images, None)) is None:
                    raise errors.InvalidArgument(f"{where} has more image parts than there are images", field=where)
                chat.parts.add(image=image)
            case _:
                raise errors.InvalidArgument(f"{where} has a part that is neither text nor image", field=where)
    return chat


# -- the service -------------------------------------------------------------------------------------------------------


class _Answer:
    """Events -> ModelInferResponses of one request."""

    def __init__(self, question: Question, id: str, model: str) -> None:
        self._question, self._id, self._model = question, id, model
        self._text: list[str] = []
        self._ids: list[int] = []
        self.queue_seconds = 0.0
        self._usage: dict[str, int] = {}

    def add(self, event: Started | Delta | Finished) -> Any | None:
        """A response that is due now, on a stream."""
        match event:
            case Delta() if self._question.stream:
                return self.response(event.text, event.token_ids, "", final=False)
            case Delta():
                self._text.append(event.text)
                self._ids += event.token_ids
            case Finished():
                usage = event.usage
                self.queue_seconds = usage.queue_seconds
                self._usage = {
                    "prompt_tokens": usage.prompt_tokens, "image_tokens": usage.image_tokens,
                    "cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens,
                }  # fmt: skip
                text = self._question.prefix + "".join(self._text)
                return self.response(text, self._ids, event.reason, final=not self._question.empty_final)
        return None

    def response(self, text: str, ids: Any, reason: str, *, final: bool) -> Any:
        response = self.empty(final=final)
        for name in self._question.outputs:
            match name:
                case "text_output":
                    response.outputs.add(name=name, datatype="BYTES", shape=[1])
                    response.raw_output_contents.append(_bytes_tensor(text))
                case "token_ids":
                    response.outputs.add(name=name, datatype="INT32", shape=[len(ids)])
                    response.raw_output_contents.append(struct.pack(f"<{len(ids)}i", *ids))
                case "finish_reason":
                    response.outputs.add(name=name, datatype="BYTES", shape=[1])
                    response.raw_output_contents.append(_bytes_tensor(reason))
        for name, count in self._usage.items():
            response.parameters[name].int64_param = count
        return response

    def empty(self, *, final: bool) -> Any:
        response = message("ModelInferResponse")(model_name=self._model, model_version=VERSION, id=self._id)
        response.parameters["triton_final_response"].bool_param = final
        return response


@dataclass
class _Statistics:
    count: int = 0
    last: int = 0
    success: tuple[int, float] = (0, 0.0)
    fail: tuple[int, float] = (0, 0.0)
    queue: float = 0.0

    def add(self, ok: bool, seconds: float, queue: float) -> None:
        self.last = time.time_ns() // 1_000_000
        if ok:
            self.count += 1
            self.success = (self.success[0] + 1, self.success[1] + seconds)
            self.queue += queue
        else:
            self.fail = (self.fail[0] + 1, self.fail[1] + seconds)


class KServeServicer:
    """The methods by their names on the wire. What they raise, `service.rpc.interceptor` turns into statuses."""

    def __init__(
        self, calls: Calls, model: model_pb2.Model, budget: ByteBudget, *, ready: Callable[[], bool], version: str
    ) -> None:
        self._calls, self._model, self._budget = calls, model, budget
        self._ready, self._version = ready, version
        self._statistics = _Statistics()

    def handler(self) -> Any:
        """What `add_generic_rpc_handlers` takes."""
        methods = {}
        for method in _pool.FindServiceByName(SERVICE).methods:
            body = getattr(self, method.name, None) or _unimplemented(method.name)
            kind = (
                grpc.stream_stream_rpc_method_handler
                if method.client_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            methods[method.name] = kind(
                body, request_deserializer=request.FromString, response_serializer=response.SerializeToString
            )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return message("ServerReadyResponse")(ready=self._ready())

    async def ModelReady(self, request: Any, context: Any) -> Any:
        known = request.name == self._model.name and request.version in ("", VERSION)
        return message("ModelReadyResponse")(ready=known and self._ready())

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return message("ServerMetadataResponse")(name="saccade", version=self._version, extensions=EXTENSIONS)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        self._check_model(request.name, request.version)
        response = message("ModelMetadataResponse")(name=self._model.name, versions=[VERSION], platform="saccade")
        for tensors, target in ((INPUTS, response.inputs), (OUTPUTS, response.outputs)):
            for name, datatype, shape in tensors:
                target.add(name=name, datatype=datatype, shape=shape)
        return response

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        self._check_model(request.name, request.version)
        types = {"BYTES": 13, "BOOL": 1, "INT32": 8}
        config = message("ModelConfig")(
            name=self._model.name, platform="saccade", backend="saccade", max_batch_size=0,
            model_transaction_policy={"decoupled": True},
        )  # fmt: skip
        for name, datatype, dims in INPUTS:
            config.input.add(name=name, data_type=types[datatype], dims=dims, optional=True)
        for name, datatype, dims in OUTPUTS:
            config.output.add(name=name, data_type=types[datatype], dims=dims)
        return message("ModelConfigResponse")(config=config)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        if request.name:
            self._check_model(request.name, request.version)
        ours, response = self._statistics, message("ModelStatisticsResponse")()
        entry = response.model_stats.add(
            name=self._model.name, version=VERSION, last_inference=ours.last, inference_count=ours.count,
            execution_count=ours.count,
        )  # fmt: skip
        infer, queue = entry.inference_stats, round(ours.queue * 1e9)
        infer.success.count, infer.success.ns = ours.success[0], round(ours.success[1] * 1e9)
        infer.fail.count, infer.fail.ns = ours.fail[0], round(ours.fail[1] * 1e9)
        infer.queue.count, infer.queue.ns = ours.count, queue
        infer.compute_infer.count, infer.compute_infer.ns = ours.count, max(0, infer.success.ns - queue)
        return response

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        response = message("RepositoryIndexResponse")()
        if self._ready() or not request.ready:
            state = "READY" if self._ready() else "UNAVAILABLE"
            response.models.add(name=self._model.name, version=VERSION, state=state)
        return response

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        remaining: float | None = context.time_remaining()
        last = None
        async with contextlib.aclosing(self._responses(request, remaining, streaming=False)) as responses:
            async for response in responses:
                last = response
        return last

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        out: asyncio.Queue[Any] = asyncio.Queue(maxsize=MAX_OPEN)
        slots, tasks = asyncio.Semaphore(MAX_OPEN), set[asyncio.Task[None]]()

        async def read() -> None:
            try:
                first = True
                async for request in requests:
                    await slots.acquire()
                    tasks.add(task := asyncio.create_task(self._answer(request, first, context, out)))
                    task.add_done_callback(lambda done: (tasks.discard(done), slots.release()))  # type: ignore[func-returns-value]
                    first = False
                while tasks:
                    await asyncio.wait(tasks)
            except Exception as error:  # handed to the call
                await out.put(error)
            else:
                await out.put(None)

        reader = asyncio.create_task(read())
        try:
            while (item := await out.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            ending = [reader, *tasks]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _answer(self, request: Any, first: bool, context: Any, out: asyncio.Queue[Any]) -> None:
        """One request of a stream: its failure is a message, and the stream goes on."""
        wrap = message("ModelStreamInferResponse")
        try:
            call = current_call()
            if not first:  # the first was counted with the call
                call.tenant.limits.admit("requests", 1)
            with self._budget.hold(call.tenant.name) as add:
                add(request.ByteSize())
                # media that it names are this request's, and not the stream's for as long as that lasts
                mine = replace(call, hold_bytes=add, generations=0)
                set_current_call(mine)
                responses = self._responses(request, context.time_remaining(), streaming=True)
                try:
                    async with contextlib.aclosing(responses):
                        async for response in responses:
                            await out.put(wrap(infer_response=response))
                finally:
                    call.generations += mine.generations
        except Exception as error:  # each becomes a message
            status = errors.to_status(error)
            response = message("ModelInferResponse")(model_name=request.model_name, id=request.id)
            response.parameters["triton_final_response"].bool_param = True
            # Triton's client hands on the text alone, so the id is in it too, as in Triton's own errors.
            prefix = f"[request id: {request.id[:128]}] " if request.id else ""
            text = f"{prefix}[{status.code.name}] {status.message}"
            await out.put(wrap(error_message=text, infer_response=response))

    async def _responses(self, request: Any, remaining: float | None, *, streaming: bool) -> AsyncGenerator[Any, None]:
        began, ok, queue = time.monotonic(), False, 0.0
        try:
            self._check_model(request.model_name, request.model_version)
            question = await read(read_request, request)
            question.stream &= streaming
            question.empty_final &= streaming
            answer = _Answer(question, request.id, self._model.name)
            timeout = min((t for t in (remaining, question.timeout) if t is not None), default=None)
            spec = await read(convert.spec_from_proto, question.request)
            async with contextlib.aclosing(self._calls.stream(spec, timeout=timeout)) as events:
                async for event in events:
                    if (response := answer.add(event)) is not None:
                        yield response
            if question.empty_final:
                yield answer.empty(final=True)
            ok, queue = True, answer.queue_seconds
        finally:
            self._statistics.add(ok, time.monotonic() - began, queue)

    def _check_model(self, name: str, version: str) -> None:
        if name != self._model.name or version not in ("", VERSION):
            raise errors.NotFound(
                f"no model {name!r} in version {version or VERSION!r}; there is {self._model.name!r} in {VERSION!r}",
                field="model_name",
            )


def _unimplemented(name: str) -> Callable[[Any, Any], Any]:
    async def refuse(request: Any, context: Any) -> Any:
        raise errors.Unimplemented(f"{name} is not served here")

    return refuse
