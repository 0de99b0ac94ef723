"""The asyncio client: the same methods as the synchronous one, as coroutines."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from saccade._core.images import ImageInput
from saccade._core.mapping import check_concurrency, map_async, outcome, prepare_mapping
from saccade._core.methods import (
    embed_image_steps,
    embed_steps,
    generate_steps,
    get_model_steps,
    models_steps,
    tokenize_steps,
)
from saccade._core.requests import (
    GenerateOptions,
    Prompt,
    Sampling,
    build_request,
    chat_messages,
    embed_image_request,
    embed_request,
    tokenize_request,
)
from saccade._core.results import generation_from
from saccade._core.resuming import StreamState, stream_settings
from saccade._core.retrying import Deadline, Retries
from saccade._core.settings import CallOptions, CallSettings, Settings, TLSConfig, make_settings
from saccade._core.steps import Call, Steps, drive_async
from saccade._core.uploads import Uploads
from saccade._core.videos import VideoInput
from saccade._transport.channel import channel_credentials, stub_class
from saccade.client import _left_to_the_parent
from saccade.errors import Cancelled, FailedPrecondition, error_from_rpc
from saccade.jobs import AsyncBatches
from saccade.media import AsyncMedia
from saccade.types import Delta, Embedding, Generation, Model, Outcome, Tensor, Tokens
from saccade.v1 import inference_pb2

if TYPE_CHECKING:
    from saccade._jobs.job import BatchSummary


T = TypeVar("T")


class AsyncStream(AsyncIterator[Delta]):
    """An answer as it is written: `async for` gives its deltas, `await stream.final()` the whole.

    `async with` cancels the work on the server on leaving. Awaiting the stream itself sends the request without reading
    from it; the first read does so too. A stream that breaks off is continued, as with the synchronous client.
    """

    def __init__(
        self,
        client: AsyncClient,
        build: Callable[[], inference_pb2.GenerateRequest],
        calls: CallSettings,
        timeout: float | None,
        resume: bool,
    ) -> None:
        self._client = client
        self._build = build
        self._calls = calls
        self._timeout = timeout
        self._resume = resume
        self._state: StreamState | None = None
        self._call: Any = None
        self._closed = False
        self._generation: Generation | None = None

    def __await__(self) -> Generator[Any, None, Self]:
        return self._opened().__await__()

    async def _opened(self) -> Self:
        if self._state is None and not self._closed:
            # Reading files and encoding arrays takes time that the event loop does not have.
            deadline = self._client._deadline(self._timeout)
            request = await asyncio.to_thread(self._build)
            uploads = Uploads(request, self._calls.upload_above)
            await self._client._drive(uploads.steps(), deadline)
            if not self._closed:
                self._call = self._client._open(request, deadline)
            self._state = StreamState(request, self._calls, deadline, self._resume, uploads)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._state is not None and self._state.failure is not None:
            raise self._state.failure
        await self._opened()
        try:
            while not self._closed:
                assert self._state is not None
                response = await self._receive(self._state)
                if response is None:
                    break
                delta = self._state.take(response)
                if delta is not None:
                    return delta
        except BaseException as error:
            if not self._closed and self._state is not None:
                self._state.failed(error)
            await self.close()
            raise
        if not self._closed:
            await self.close()
            assert self._state is not None
            self._generation = self._state.assembler.finish()
        raise StopAsyncIteration

    async def _receive(self, state: StreamState) -> inference_pb2.StreamGenerateResponse | None:
        """The next message of this attempt or of the next one; None at the end."""
        import grpc

        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(state.patience()):
                    response = await self._call.read()
                return None if response is grpc.aio.EOF else response
            except TimeoutError:
                raise state.out_of_patience() from None
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error, request_id=self.request_id)
            except asyncio.CancelledError:
                # grpc.aio reports a call that was cancelled by a close() in the same way as a task that was cancelled.
                if (self._closed or self._client._ended) and not _task_is_cancelled():
                    raise Cancelled("the stream has been closed", request_id=self.request_id) from None
                raise
            finally:
                state.waited(time.monotonic() - began)
            if state.assembler.complete:
                return None  # the answer is whole; only the end of the call was lost
            if self._closed:
                raise error from error.__cause__
            recovery = state.recovery(error)
            if recovery is not None:
                await self._client._drive(recovery, state.deadline)
            else:
                delay = state.delay_after(error)
                await asyncio.sleep(delay)
                state.waited(delay)
            if self._closed:
                raise Cancelled("the stream has been closed", request_id=self.request_id)
            self._call.cancel()
            self._call = self._client._open(state.next_request(), state.deadline)

    @property
    def request_id(self) -> str:
        """Empty until the request has been built, by awaiting or reading the stream."""
        return self._state.request.request_id if self._state else ""

    @property
    def text(self) -> str:
        """The first sample's text so far."""
        return self._state.assembler.text() if self._state else ""

    @property
    def token_ids(self) -> list[int]:
        """The first sample's token ids so far."""
        return self._state.assembler.token_ids() if self._state else []

    @property
    def seed(self) -> int | None:
        """The seed in use, once the stream's first message has come."""
        return self._state.seed if self._state else None

    async def final(self) -> Generation:
        """Reads the stream to its end and returns the whole answer.

        Raises:
            Cancelled: the stream was closed before its end.
            SaccadeError: it failed; the same error each time it is asked.
        """
        async for _ in self:
            pass
        if self._generation is None:
            raise Cancelled("the stream was closed before its end", request_id=self.request_id)
        return self._generation

    async def close(self) -> None:
        """Cancels what is still running; what has come so far stays readable."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return await self._opened()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _beside_the_loop(messages: Iterator[Any]) -> AsyncGenerator[Any, None]:
    """Messages that are read from a file."""
    while (message := await asyncio.to_thread(next, messages, None)) is not None:
        yield message


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Connection:
    """A channel and its stubs, of one event loop."""

    def __init__(self, settings: Settings) -> None:
        import grpc

        options = settings.all_channel_options()
        if settings.tls is None:
            self.channel = grpc.aio.insecure_channel(settings.address, options)
        else:
            self.channel = grpc.aio.secure_channel(settings.address, channel_credentials(settings.tls), options)
        self._stubs: dict[str, Any] = {}

    def stub(self, service: str) -> Any:
        if service not in self._stubs:
            self._stubs[service] = stub_class(service)(self.channel)
        return self._stubs[service]


class AsyncClient:
    """A connection to a server for asyncio programs, made when it is first used, in the event loop that uses it.

    The arguments are those of `saccade.Client`.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool | TLSConfig | None = None,
        timeout: float | None = 600.0,
        max_retries: int | None = None,
        channel_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._set_up(
            make_settings(
                address,
                api_key=api_key,
                tls=tls,
                timeout=timeout,
                max_retries=max_retries,
                channel_options=channel_options,
            )
        )

    def _set_up(self, settings: Settings, origin: AsyncClient | None = None) -> None:
        self._settings = settings
        self._origin = origin
        self._connections: dict[asyncio.AbstractEventLoop, _Connection] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def __getstate__(self) -> Settings:
        return self._settings

    def __setstate__(self, settings: Settings) -> None:
        self._set_up(settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address!r})"

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """A copy with other settings for its calls; see `saccade.Client.with_options`."""
        copy = type(self).__new__(type(self))
        copy._set_up(replace(self._settings, calls=self._settings.calls.changed(**options)), self._origin or self)
        return copy

    async def generate(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        raw: bool = False,
        timeout: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Asks the model and waits for the whole answer; see `saccade.Client.generate`."""
        request = await asyncio.to_thread(
            build_request, prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
            logprobs=logprobs, **sampling,
        )  # fmt: skip
        return generation_from(await self._generate(request, timeout), request.sampling.HasField("logprobs"))

    def stream(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        raw: bool = False,
        timeout: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first_token_timeout: float | None = None,
        idle_timeout: float | None = None,
        resume: bool = True,
        **sampling: Unpack[Sampling],
    ) -> AsyncStream:
        """The answer as it is written: `async for delta in client.stream(...)`; awaiting it first works too. See
        `saccade.Client.stream`."""

        def build() -> inference_pb2.GenerateRequest:
            return build_request(
                prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
                max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
                logprobs=logprobs, **sampling,
            )  # fmt: skip

        calls = stream_settings(self._settings.calls, first_token_timeout, idle_timeout)
        return AsyncStream(self, build, calls, timeout, resume)

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Asks for the next message of a conversation; see `saccade.Client.chat`."""
        return await self.generate(chat_messages(messages, system), **options)

    async def embed(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "",
        priority: int | None = None,
        timeout: float | None = None,
    ) -> Embedding:
        """The model's hidden states for a prompt; see `saccade.Client.embed`."""
        request = await asyncio.to_thread(
            embed_request, prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
            model=model, priority=priority,
        )  # fmt: skip
        return await self._steps(embed_steps(request, self._settings.calls.upload_above), timeout)

    async def embed_image(self, image: ImageInput, *, model: str = "", timeout: float | None = None) -> Tensor:
        """A picture's tokens behind the projector; see `saccade.Client.embed_image`."""
        request = await asyncio.to_thread(embed_image_request, image, model=model)
        return await self._steps(embed_image_steps(request, self._settings.calls.upload_above), timeout)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Iterable[VideoInput] | VideoInput = (),
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Tokens:
        """What `generate` would make of a prompt, and how much of the context it takes."""
        request = await asyncio.to_thread(
            tokenize_request,
            prompt,
            images=images,
            videos=videos,
            raw=raw,
            chat_template_kwargs=chat_template_kwargs,
            model=model,
        )
        return await self._steps(tokenize_steps(request, self._settings.calls.upload_above), timeout)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that are served."""
        return await self._steps(models_steps(), timeout)

    async def get_model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """A model with its limits; without a name, the only one."""
        return await self._steps(get_model_steps(name), timeout)

    def map(
        self,
        requests: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        concurrency: int = 32,
        ordered: bool = False,
    ) -> AsyncGenerator[Outcome, None]:
        """Answers many requests: `async for outcome in client.map(...)`; see `saccade.Client.map`. Who leaves
        it before its end should `aclose` it."""
        check_concurrency(concurrency)
        return self._map(requests, concurrency, ordered)

    async def _map(
        self,
        requests: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        concurrency: int,
        ordered: bool,
    ) -> AsyncGenerator[Outcome, None]:
        async with aclosing(
            map_async(self, requests, prepare_mapping, concurrency=concurrency, ordered=ordered)
        ) as results:
            async for index, request, result in results:
                yield outcome(index, request, result)

    async def run_batch(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        max_retries: int | None = 8,
        **options: Any,
    ) -> BatchSummary:
        """Answers a file of requests into another; see `saccade.Client.run_batch`."""
        from saccade._jobs.job import BatchJob, BatchOptions, run_async

        job = BatchJob(source, output, BatchOptions.of(options))
        return await run_async(self.with_options(max_retries=max_retries), job)

    @property
    def media(self) -> AsyncMedia:
        """Uploaded pictures."""
        return AsyncMedia(self)

    @property
    def batches(self) -> AsyncBatches:
        """Batches that the server works on by itself."""
        return AsyncBatches(self)

    async def _steps(self, steps: Steps[T], timeout: float | None) -> T:
        return await self._drive(steps, self._deadline(timeout))

    async def _drive(self, steps: Steps[T], deadline: Deadline) -> T:
        return await drive_async(steps, lambda call: self._made(call, deadline))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._settings.calls.timeout if timeout is None else timeout)

    @staticmethod
    async def _beside(function: Callable[..., T], *arguments: Any) -> T:
        """Files and encoding take time that the event loop does not have."""
        return await asyncio.to_thread(function, *arguments)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse:
        response: inference_pb2.GenerateResponse = await self._steps(
            generate_steps(request, self._settings.calls.upload_above), timeout
        )
        return response

    async def _made(self, call: Call, deadline: Deadline) -> Any:
        """One call with one answer, over all its attempts."""
        import grpc

        retries = Retries(self._settings.calls.max_retries, deadline, registers=bool(call.request_id))
        while True:
            try:
                sent = _beside_the_loop(call.message()) if callable(call.message) else call.message
                return await getattr(self._stub(call.service), call.method)(
                    sent, timeout=deadline.left(), metadata=self._settings.call_metadata()
                )
            except grpc.RpcError as rpc_error:
                error = call.judged(error_from_rpc(rpc_error, request_id=call.request_id))
            except asyncio.CancelledError:
                if self._ended and not _task_is_cancelled():
                    raise Cancelled("the client has been closed", request_id=call.request_id) from None
                raise
            await asyncio.sleep(retries.delay_after(error))

    async def _server_stream(self, service: str, method: str, message: Any) -> AsyncGenerator[Any, None]:
        """The messages of a call that is none of a generation."""
        import grpc

        call = getattr(self._stub(service), method)(message, metadata=self._settings.call_metadata())
        try:
            async for response in call:
                yield response
        except grpc.RpcError as rpc_error:
            raise error_from_rpc(rpc_error) from rpc_error
        finally:
            call.cancel()

    def _open(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> Any:
        return self._stub("inference").StreamGenerate(
            inference_pb2.StreamGenerateRequest(request=request),
            timeout=deadline.remaining(),
            metadata=self._settings.call_metadata(),
        )

    @property
    def _ended(self) -> bool:
        return self._closed or (self._origin is not None and self._origin._closed)

    def _stub(self, service: str) -> Any:
        if self._closed:
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
        if self._origin is not None:
            return self._origin._stub(service)
        loop = asyncio.get_running_loop()
        with self._lock_of_this_process():
            connection = self._connections.get(loop)
            if connection is None:
                # A channel that nobody holds any more closes itself; those of loops that are over have nobody else.
                self._connections = {held: c for held, c in self._connections.items() if not held.is_closed()}
                connection = self._connections[loop] = _Connection(self._settings)
            return connection.stub(service)

    def _lock_of_this_process(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A fork copied this object, its lock in whatever state a thread of the parent held it.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            _left_to_the_parent.append(self._connections)
            self._connections = {}
        return self._lock

    async def close(self) -> None:
        """Closes the connections; calls that are still running end as Cancelled. May be called any number of times."""
        with self._lock_of_this_process():
            connections, self._connections = self._connections, {}
            self._closed = True
        here = asyncio.get_running_loop()
        for loop, connection in connections.items():
            if loop is here:
                await connection.channel.close()
            elif loop.is_running():  # in another thread
                asyncio.run_coroutine_threadsafe(connection.channel.close(), loop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
