"""The gRPC methods: proto in, frontend, proto out. Every failure leaves through `service.errors`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeAlias

from saccade.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from service import convert, errors
from service.frontend import Frontend
from service.types import Event

log = logging.getLogger(__name__)

Context: TypeAlias = Any
"""`grpc.aio.ServicerContext`, which ships no type information."""


async def end_with(context: Context, error: BaseException, request_id: str) -> None:
    """Ends the call with the status of `error`. Does not return."""
    status = errors.to_status(error)
    if isinstance(status, errors.Internal):
        log.error("request %s failed", request_id or "without id", exc_info=error)
    trailers: list[tuple[str, str | bytes]] = []
    if (packed := errors.details(status, request_id)) is not None:
        trailers.append(("grpc-status-details-bin", packed))
    if status.retry_after is not None:
        trailers.append(("grpc-retry-pushback-ms", str(round(status.retry_after * 1000))))
    await context.abort(status.code, status.message, tuple(trailers))


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generate and StreamGenerate."""

    def __init__(
        self, frontend: Frontend, *, default_timeout: float, draining: Callable[[], bool] = lambda: False
    ) -> None:
        self._frontend = frontend
        self._default_timeout = default_timeout
        self._draining = draining

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        builder = convert.ResponseBuilder()
        try:
            async with contextlib.aclosing(self._events(request, context)) as events:
                async for event in events:
                    builder.add(event)
            return builder.response()
        except Exception as error:  # each becomes a status
            await end_with(context, error, request.request_id)
            raise

    async def StreamGenerate(
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.StreamGenerateResponse, None]:
        try:
            # aclosing: a call that is cancelled while it is blocked in `yield` ends by GeneratorExit, and the engine
            # must hear of it at once, not when the garbage collector comes by
            async with contextlib.aclosing(self._events(request.request, context)) as events:
                async for event in events:
                    yield convert.event_to_proto(event)
        except Exception as error:  # each becomes a status
            await end_with(context, error, request.request.request_id)

    async def _events(self, request: inference_pb2.GenerateRequest, context: Context) -> AsyncGenerator[Event, None]:
        if self._draining():
            raise errors.Unavailable("the server is shutting down", reason="DRAINING", retry_after=1.0)
        # Without a deadline of the client's own, a lost peer behind a silent network would hold its slot for ever.
        timeout = self._default_timeout if context.time_remaining() is None else None
        spec = convert.spec_from_proto(request)
        async with asyncio.timeout(timeout):
            async with contextlib.aclosing(self._frontend.stream(spec)) as events:
                async for event in events:
                    yield event


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """GetModel and ListModels: this server has one model."""

    def __init__(self, model: model_pb2.Model) -> None:
        self._model = model

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        if request.name not in ("", self._model.name):
            error = errors.NotFound(f"no model {request.name!r}; this server has {self._model.name!r}", field="name")
            await end_with(context, error, "")
        return model_pb2.GetModelResponse(model=self._model)

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> Any:
        return model_pb2.ListModelsResponse(models=[self._model])
