"""KServe v2 with Triton's extensions, `inference.GRPCInferenceService`, for unmodified Triton clients.

`service.rpc.kserve_tensors` describes the content of a request. A streamed answer ends with a response without text
that says why it ended. `triton_final_response` is true in this response or, if the request sets
`triton_enable_empty_final_response`, in an empty response after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from saccade.v1 import model_pb2
from service.answers import convert
from service.answers.calls import Calls
from service.answers.door import note
from service.common import errors
from service.common.limits import ByteBudget
from service.common.types import CallDelta, Delta, Finished, Started
from service.rpc.handlers import handler_of
from service.rpc.kserve_messages import POOL, SERVICE, message
from service.rpc.kserve_requests import Question, read_request
from service.rpc.kserve_tensors import INPUTS, OUTPUTS, write_tensor
from service.rpc.servicer import converted_request
from service.telemetry.call_context import current_call, set_current_call

VERSION = "1"
MAX_OPEN = 256
"""Requests of one stream that run at a time; the next is read when one has ended."""
MAX_ID = 1024
"""Largest number of characters of a request's id, which each of its responses repeats."""
EXTENSIONS = ("model_repository", "model_configuration", "statistics", "parameters", "binary_tensor_data")


class _Answer:
    """Converts the events of one request to ModelInferResponses."""

    def __init__(self, question: Question, id: str, model: str) -> None:
        self._question, self._id, self._model = question, id, model
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._ids: list[int] = []
        self._calls: list[CallDelta] = []
        self.queue_seconds = 0.0
        self._usage: dict[str, int] = {}

    def add(self, event: Started | Delta | Finished) -> Any | None:
        """Adds an event; returns the response to send now, if any."""
        match event:
            case Delta() if self._question.stream:
                return self.response(event.text, event.reasoning, event.token_ids, event.calls, "", final=False)
            case Delta():
                self._text.append(event.text)
                self._reasoning.append(event.reasoning)
                self._ids += event.token_ids
                self._calls += event.calls
            case Finished():
                usage = event.usage
                self.queue_seconds = usage.queue_seconds
                self._usage = {
                    "prompt_tokens": usage.prompt_tokens, "image_tokens": usage.image_tokens,
                    "cached_tokens": usage.cached_tokens, "completion_tokens": usage.completion_tokens,
                    "reasoning_tokens": usage.reasoning_tokens,
                }  # fmt: skip
                text = self._question.prefix + "".join(self._text)
                reasoning, final = "".join(self._reasoning), not self._question.empty_final
                return self.response(text, reasoning, self._ids, self._calls, event.reason, final=final)
        return None

    def response(
        self, text: str, reasoning: str, ids: Any, calls: Sequence[CallDelta], reason: str, *, final: bool
    ) -> Any:
        response = self.empty(final=final)
        parts = [
            {"index": part.index, "id": part.id, "name": part.name, "arguments": part.arguments}
            for part in convert.merged_calls(calls)
        ]
        values = {
            "text_output": text, "token_ids": ids, "finish_reason": reason, "reasoning": reasoning,
            "tool_calls": json.dumps(parts, ensure_ascii=False),
        }  # fmt: skip
        for name in self._question.outputs:
            write_tensor(response, name, values[name])
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
    """The methods by their names in the protocol. `service.rpc.interceptor` converts their errors to statuses."""

    def __init__(
        self, calls: Calls, model: model_pb2.Model, budget: ByteBudget, *, ready: Callable[[], bool], version: str
    ) -> None:
        self._calls, self._model, self._budget = calls, model, budget
        self._ready, self._version = ready, version
        self._statistics = _Statistics()

    def handler(self) -> Any:
        """The handler for `add_generic_rpc_handlers`."""
        service = POOL.FindServiceByName(SERVICE)
        names = [method.name for method in service.methods]
        return handler_of(service, {name: getattr(self, name, None) or _unimplemented(name) for name in names})

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

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            slots.release()

        async def answer_all() -> None:
            try:
                first = True
                async for request in requests:
                    await slots.acquire()
                    tasks.add(task := asyncio.create_task(self._answer(request, first, context, out)))
                    task.add_done_callback(ended)
                    first = False
                while tasks:
                    await asyncio.wait(tasks)
            except Exception as error:  # raised again in the call
                await out.put(error)
            else:
                await out.put(None)

        reader = asyncio.create_task(answer_all())
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
        """Answers one request of a stream. If it fails, an error message is sent and the stream continues."""
        wrap, call = message("ModelStreamInferResponse"), current_call()
        mine = replace(
            call, request_bytes=request.ByteSize(), request_id=request.id[:128], started=time.monotonic(), generations=0
        )
        try:
            if not first:  # the first was counted with the call
                call.tenant.limits.admit("requests", 1)
            with self._budget.hold(call.tenant.name) as add:
                add(mine.request_bytes)
                # This request holds the bytes of its media, not the whole stream.
                mine.hold_bytes = add
                set_current_call(mine)
                responses = self._responses(request, context.time_remaining(), streaming=True)
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        await out.put(wrap(infer_response=response))
        except Exception as error:  # each becomes an error message
            status = note(mine, errors.to_status(error), error)
            if not mine.generations:  # rejected before it got a line in the access log
                self._calls.access.write(mine, seconds=time.monotonic() - mine.started)
                mine.generations = 1
            response = message("ModelInferResponse")(model_name=request.model_name, id=request.id[:MAX_ID])
            response.parameters["triton_final_response"].bool_param = True
            # Triton's client shows only the text, so the request id is in the text, as in Triton's own errors.
            prefix = f"[request id: {request.id[:128]}] " if request.id else ""
            text = f"{prefix}[{status.code.name}] {status.message}"
            await out.put(wrap(error_message=text, infer_response=response))
        finally:
            call.generations += mine.generations

    async def _responses(self, request: Any, remaining: float | None, *, streaming: bool) -> AsyncGenerator[Any, None]:
        began, ok, queue = time.monotonic(), False, 0.0
        try:
            self._check_model(request.model_name, request.model_version)
            if len(request.id) > MAX_ID:
                raise errors.InvalidArgument(
                    f"id has {len(request.id)} characters; at most {MAX_ID} are allowed", field="id"
                )
            question = await converted_request(read_request, request)
            question.stream &= streaming
            question.empty_final &= streaming
            answer = _Answer(question, request.id, self._model.name)
            timeout = min((t for t in (remaining, question.timeout) if t is not None), default=None)
            spec = await converted_request(
                partial(convert.spec_from_proto, whole=not question.stream), question.request
            )
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
                f"no model {name!r} with version {version or VERSION!r}; this server has {self._model.name!r} with "
                f"version {VERSION!r}",
                field="model_name",
            )


def _unimplemented(name: str) -> Callable[[Any, Any], Any]:
    async def refuse(request: Any, context: Any) -> Any:
        raise errors.Unimplemented(f"{name} is not implemented by this server")

    return refuse
