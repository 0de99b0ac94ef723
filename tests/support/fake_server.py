"""A real gRPC server with scripted answers, for the client's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from saccade.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    types_pb2,
)

NEW = tuple(int(part) for part in grpc.__version__.split(".")[:2]) >= (1, 70)
needs_ring = pytest.mark.skipif(not NEW, reason="the hash ring reads headers from grpcio 1.70 on")


@dataclass
class Failure(Exception):
    """The status with which a call fails."""

    code: grpc.StatusCode
    message: str = "refused"
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after: float | None = None
    pushback: str | None = None
    request_id: str = ""
    violation: str = ""

    def abort(self, context: grpc.ServicerContext) -> None:
        details: list[Any] = []
        if self.reason:
            details.append(error_details_pb2.ErrorInfo(reason=self.reason, domain="saccade", metadata=self.metadata))
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(int(self.retry_after * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if self.request_id:
            details.append(error_details_pb2.RequestInfo(request_id=self.request_id))
        if self.violation:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.violation, description="is wrong")
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        trailers: list[tuple[str, str | bytes]] = []
        if details:
            status = status_pb2.Status(code=self.code.value[0], message=self.message)
            for detail in details:
                packed = any_pb2.Any()
                packed.Pack(detail)
                status.details.append(packed)
            trailers.append(("grpc-status-details-bin", status.SerializeToString()))
        if self.pushback is not None:
            trailers.append(("grpc-retry-pushback-ms", self.pushback))
        context.set_trailing_metadata(trailers)
        context.abort(self.code, self.message)


@dataclass
class Script:
    """What the servicer answers, and what it has received. A request consumes the next of `failures` first, if there is
    one."""

    words: list[str] = field(default_factory=lambda: ["a ", "red ", "square"])
    failures: list[Failure] = field(default_factory=list)
    fail_after: int | None = None
    """Streams break with the next failure after this many deltas, instead of before the first message."""
    hang_after: int | None = None
    """Streams wait for cancellation after this many deltas; unary calls do so at once."""
    idle_after: int | None = None
    """Streams send nothing after this many deltas, but stay open until they are cancelled."""
    break_after: list[int] = field(default_factory=list)
    """The next streams break with ENGINE_DIED after this many new deltas each."""
    reasoning: str = ""
    """Reasoning of each sample, with its first delta."""
    answer: Callable[[inference_pb2.GenerateRequest], list[str]] | None = None
    """The words for a request, instead of `words`; may raise a Failure."""
    version: str = "1"
    """Version of the model."""
    gate: threading.Semaphore | None = None
    """Each unary call waits until this is released once."""
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each hanging call that has ended."""

    def words_for(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> list[str]:
        if self.answer is None:
            return self.words
        try:
            return self.answer(request)
        except Failure as failure:
            failure.abort(context)
            raise

    def see(self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))

    def hang(self, context: grpc.ServicerContext) -> None:
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait(timeout=30)


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GenerateResponse:
        script = self.script
        script.see(request, context)
        if script.failures:
            script.failures.pop(0).abort(context)
        if script.hang_after is not None:
            script.hang(context)
            script.ended.release()
        if script.gate is not None:
            script.gate.acquire()
        words = script.words_for(request, context)
        return inference_pb2.GenerateResponse(
            request_id=request.request_id,
            model="fake",
            model_version=script.version,
            seed=request.sampling.seed or 7,
            samples=[self._sample(request, index, words) for index in reversed(range(max(1, request.sampling.n)))],
        )

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        images = len(request.prompt.images)
        ids = [*[99] * images, *request.prompt.text.encode()]
        return inference_pb2.TokenizeResponse(
            token_ids=ids,
            prompt_tokens=len(ids) + 3 * images,
            image_tokens=4 * images,
            tokens_per_image=[4] * images,
        )

    def StreamGenerate(
        self, request: inference_pb2.StreamGenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.StreamGenerateResponse]:
        script = self.script
        script.see(request.request, context)
        if script.failures and script.fail_after is None:
            script.failures.pop(0).abort(context)
        try:
            yield from self._stream(request.request, context)
        finally:
            # If a call ends while a message is being sent, gRPC does not resume the generator but closes it there.
            if script.hang_after is not None:
                script.ended.release()

    def _stream(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.StreamGenerateResponse]:
        script, response = self.script, inference_pb2.StreamGenerateResponse
        seed = request.sampling.seed or 7
        started = inference_pb2.Started(
            request_id=request.request_id, model="fake", model_version=script.version, seed=seed, prompt_tokens=9
        )
        yield response(started=started)
        words = script.words_for(request, context)
        samples = [self._sample(request, index, words) for index in range(max(1, request.sampling.n))]
        break_after = script.break_after.pop(0) if script.break_after else None
        before = len(request.continued_token_ids)
        for position, word in enumerate(words):
            if position < before:
                continue
            if break_after is not None and position == before + break_after:
                Failure(grpc.StatusCode.UNAVAILABLE, reason="ENGINE_DIED", retry_after=0.001).abort(context)
            if script.idle_after == position:
                script.hang(context)
                return
            if script.fail_after == position and script.failures:
                script.failures.pop(0).abort(context)
            if script.hang_after == position:
                script.hang(context)
                return
            for sample in samples:
                delta = inference_pb2.Delta(
                    index=sample.index,
                    text=word,
                    token_ids=[position],
                    logprobs=sample.logprobs[position : position + 1],
                    sequence=position - before,
                    reasoning=script.reasoning if position == 0 else "",
                )
                yield response(delta=delta)
        for sample in samples:
            finished = inference_pb2.Finished(
                index=sample.index, finish_reason=sample.finish_reason, usage=sample.usage, stop_string="."
            )
            yield response(finished=finished)

    def _sample(self, request: inference_pb2.GenerateRequest, index: int, words: list[str]) -> inference_pb2.Sample:
        logprobs = [
            types_pb2.TokenLogprob(
                token_id=i, logprob=-0.5, top=[types_pb2.TopLogprob(token_id=k, logprob=-float(k)) for k in range(2)]
            )
            for i in range(len(words))
        ]
        usage = types_pb2.Usage(prompt_tokens=9, completion_tokens=len(words))
        usage.queue_time.FromMilliseconds(5)
        return inference_pb2.Sample(
            index=index,
            text="".join(words),
            token_ids=range(len(words)),
            logprobs=logprobs if request.sampling.HasField("logprobs") else [],
            finish_reason=types_pb2.FINISH_REASON_STOP,
            usage=usage,
            stop_string=".",
        )


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Two models, one per page."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def _models(self) -> list[model_pb2.Model]:
        first = model_pb2.Model(
            name="fake",
            version=self.script.version,
            input_modalities=[model_pb2.MODALITY_TEXT, model_pb2.MODALITY_IMAGE],
            limits=model_pb2.Limits(context_length=512, max_images=3, image_formats=["PNG"]),
            image_token_id=99,
        )
        first.default_sampling.temperature = 0.5
        return [first, model_pb2.Model(name="other", version="2")]

    def GetModel(self, request: model_pb2.GetModelRequest, context: grpc.ServicerContext) -> model_pb2.GetModelResponse:
        found = [model for model in self._models() if request.name in ("", model.name)]
        if not found:
            Failure(grpc.StatusCode.NOT_FOUND).abort(context)
        return model_pb2.GetModelResponse(model=found[0])

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        page = int(request.page_token or 0)
        return model_pb2.ListModelsResponse(
            models=[self._models()[page]], next_page_token="" if page == 1 else str(page + 1)
        )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Counts its calls."""

    def __init__(self) -> None:
        self.asked = 0

    def GetLoads(self, request: admin_pb2.GetLoadsRequest, context: grpc.ServicerContext) -> admin_pb2.GetLoadsResponse:
        self.asked += 1
        return admin_pb2.GetLoadsResponse(
            live_requests=self.asked + 4,
            running=3,
            waiting=1,
            free_blocks=30,
            total_blocks=40,
            handoff_used_bytes=1536,
            handoff_capacity_bytes=2**20,
            draining=self.asked > 1,
        )


@contextmanager
def serve(
    script: Script, *, options: tuple[tuple[str, Any], ...] = (), add_port: Callable[[grpc.Server], int] | None = None
) -> Iterator[str]:
    """Runs the servicer on a free port of 127.0.0.1; yields its address."""
    server = grpc.server(futures.ThreadPoolExecutor(40), options=[("grpc.so_reuseport", 0), *options])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(script), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(), server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(script), server)
    port = add_port(server) if add_port else server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
