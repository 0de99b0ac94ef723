"""The gRPC methods: they convert messages, call `Calls` and convert results. `service.rpc.interceptor` converts their
errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from saccade.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    media_pb2,
    media_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from service.answers import convert
from service.answers.calls import Calls
from service.answers.coalesce import coalesce
from service.answers.detokenize import detokenize
from service.answers.weigh import LIGHT
from service.common import errors
from service.common.types import Event, Finished, GenerateSpec, MediaSource, Video
from service.media.arriving import header_of, receive
from service.media.media import Media, Spool, tenant_folder
from service.model.assets import ModelAssets
from service.telemetry.call_context import current_call

T = TypeVar("T")
HEADER_READERS = 2
"""Uploaded files whose headers are read at a time."""
CONCURRENT_FETCHES = 4
"""Files of one request that are fetched at a time."""
Context: TypeAlias = Any
"""`grpc.aio.ServicerContext`, which ships no type information."""


async def converted_request(convert_request: Callable[[Any], T], request: Any) -> T:
    """Converts the current call's message to a request, in a thread if it is large."""
    if current_call().request_bytes < LIGHT:
        return convert_request(request)
    return await asyncio.to_thread(convert_request, request)


async def converted_event(event: Event, convert_event: Callable[[Event], T]) -> T:
    """Converts an event to a message, in a thread if it contains log-probabilities of the prompt."""
    if isinstance(event, Finished) and event.prompt_logprobs:
        return await asyncio.to_thread(convert_event, event)
    return convert_event(event)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Generate, StreamGenerate, Embed, Tokenize and CancelGeneration."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        builder = convert.ResponseBuilder()
        async with contextlib.aclosing(await self._events(request, context, whole=True)) as events:
            async for event in events:
                await converted_event(event, builder.add)
        return builder.response()

    async def StreamGenerate(
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.StreamGenerateResponse, None]:
        chunk_tokens, max_delay = convert.chunking_from_proto(request)
        events = await self._events(request.request, context, whole=False)
        if chunk_tokens is not None or max_delay is not None:
            events = coalesce(events, chunk_tokens=chunk_tokens, max_delay=max_delay)
        async with contextlib.aclosing(events):
            async for event in events:
                yield await converted_event(event, convert.event_to_proto)

    async def _events(
        self, request: inference_pb2.GenerateRequest, context: Context, *, whole: bool
    ) -> AsyncGenerator[Event, None]:
        spec = await converted_request(partial(convert.spec_from_proto, whole=whole), request)
        current_call().request_id = spec.request_id
        return self._calls.stream(spec, timeout=context.time_remaining())

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        spec = await converted_request(convert.spec_from_embed, request)
        current_call().request_id = spec.request_id
        return convert.embedded_to_proto(await self._calls.embed(spec, timeout=context.time_remaining()))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        spec = await converted_request(convert.spec_from_tokenize, request)
        return convert.tokenized_to_proto(await self._calls.tokenize(spec, timeout=context.time_remaining()))

    async def CancelGeneration(
        self, request: inference_pb2.CancelGenerationRequest, context: Context
    ) -> inference_pb2.CancelGenerationResponse:
        await self._calls.cancel(request.request_id)
        return inference_pb2.CancelGenerationResponse()


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """GetModel, ListModels and Detokenize: this server has one model."""

    def __init__(self, model: model_pb2.Model, assets: ModelAssets) -> None:
        self._model, self._assets = model, assets

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        if request.name not in ("", self._model.name):
            raise errors.NotFound(f"no model {request.name!r}; this server has {self._model.name!r}", field="name")
        return model_pb2.GetModelResponse(model=self._model)

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> Any:
        return model_pb2.ListModelsResponse(models=[self._model])

    async def Detokenize(self, request: model_pb2.DetokenizeRequest, context: Context) -> model_pb2.DetokenizeResponse:
        ids = list(request.token_ids)
        special = request.HasField("skip_special_tokens") and not request.skip_special_tokens
        text, tokens = await asyncio.to_thread(
            detokenize, self._assets, self._model.name, request.model, ids, special=special
        )
        return model_pb2.DetokenizeResponse(text=text, tokens=tokens)


class MediaServicer(media_pb2_grpc.MediaServiceServicer):
    """The spool over gRPC. Disk work runs in threads."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        # Separate threads, because reading a file's header waits for an image worker, which must not delay other work.
        self._header_readers = ThreadPoolExecutor(HEADER_READERS, thread_name_prefix="saccade-uploads")

    async def UploadMedia(
        self, requests: AsyncIterator[media_pb2.UploadMediaRequest], context: Context
    ) -> media_pb2.UploadMediaResponse:
        header = await header_of(requests, "an upload")
        async with in_thread(self._spool.upload(_tenant(), header.size_bytes)) as upload:
            current_call().announce(header.size_bytes)
            await receive(requests, upload.write)
            media = await to_end(self._describe(upload.commit, header.media_id))
        return media_pb2.UploadMediaResponse(media=_media_to_proto(media))

    async def GetMedia(self, request: media_pb2.GetMediaRequest, context: Context) -> media_pb2.GetMediaResponse:
        media = await self._describe(self._spool.get, _tenant(), request.media_id)
        return media_pb2.GetMediaResponse(media=_media_to_proto(media))

    async def DeleteMedia(
        self, request: media_pb2.DeleteMediaRequest, context: Context
    ) -> media_pb2.DeleteMediaResponse:
        await asyncio.to_thread(self._spool.delete, _tenant(), request.media_id)
        return media_pb2.DeleteMediaResponse()

    def _describe(self, function: Callable[..., Media], *arguments: Any) -> asyncio.Future[Media]:
        return asyncio.get_running_loop().run_in_executor(self._header_readers, function, *arguments)


def _tenant() -> str:
    return tenant_folder(current_call().tenant.salt)


@contextlib.asynccontextmanager
async def in_thread(manager: Any) -> AsyncIterator[Any]:
    """Enters and exits a blocking context manager in a thread. It is exited even if the call is cancelled while it is
    being entered."""
    entering = asyncio.ensure_future(asyncio.to_thread(manager.__enter__))
    try:
        yield await to_end(entering)
    finally:
        if entering.done() and not entering.cancelled() and entering.exception() is None:
            # An upload that is not committed is deleted in any case, so the body's exception does not matter here.
            await asyncio.shield(asyncio.to_thread(manager.__exit__, None, None, None))


async def to_end(work: asyncio.Future[T]) -> T:
    """Waits for the result of a thread. Cancellations of the caller take effect only when the thread is done, so that
    the caller can undo the thread's work."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # else asyncio would report it as never retrieved
        raise cancelled
    return work.result()


def _media_to_proto(media: Media) -> media_pb2.Media:
    proto = media_pb2.Media(
        media_id=media.media_id, size_bytes=media.size, width=media.width, height=media.height, format=media.format
    )
    proto.expire_time.FromMilliseconds(round(media.expires * 1000))
    return proto


def media_resolver(
    spool: Spool, fetch: Callable[[MediaSource], Awaitable[bytes]] | None = None
) -> Callable[[GenerateSpec, bytes], Any]:
    """Makes `Frontend.resolve` of a server, which reads uploaded media from the spool and fetches URLs with `fetch`,
    which counts bytes as they arrive (`CallInfo.hold_bytes`). `fetch`: None if URLs are not allowed."""

    async def one(source: MediaSource, tenant: str, places: asyncio.Semaphore) -> Any:
        if isinstance(source, Video) and source.frames:
            return replace(source, frames=tuple(await together(source.frames, tenant, places)))
        if not source.elsewhere:
            return source
        async with places:
            return await fetched(source, tenant)

    async def fetched(source: MediaSource, tenant: str) -> Any:
        if source.media_id is not None:
            try:
                # Counted before the file is read, so that data beyond the limit is never in memory.
                current_call().hold_bytes(await asyncio.to_thread(spool.size, tenant, source.media_id))
                data = await asyncio.to_thread(spool.read, tenant, source.media_id)
            except errors.NotFound as error:
                raise errors.NotFound(f"{source.field}: {error}", field=source.field, reason=error.reason) from None
            return replace(source, data=data, media_id=None)
        if fetch is None:
            raise errors.PermissionDenied(
                f"{source.field}: this server does not fetch URLs; send the bytes or upload the file",
                field=source.field, reason="MEDIA_HOST_DENIED",
            )  # fmt: skip
        return replace(source, data=await fetch(source), uri=None)

    async def together(sources: Sequence[MediaSource], tenant: str, places: asyncio.Semaphore) -> list[Any]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(source, tenant, places)) for source in sources]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def resolve(spec: GenerateSpec, salt: bytes) -> GenerateSpec:
        places = asyncio.Semaphore(CONCURRENT_FETCHES)
        return replace(spec, media=tuple(await together(spec.media, tenant_folder(salt), places)))

    return resolve
