"""The asyncio client: the same methods as the synchronous one, as coroutines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from saccade.client import _left_to_the_parent
from saccade.errors import Cancelled, FailedPrecondition, SaccadeError, error_from_rpc
from saccade.images import ImageInput
from saccade.requests import Prompt, Sampling, build_request
from saccade.results import Assembler, generation_from
from saccade.transport import Deadline, Settings, TLSConfig, channel_credentials, make_settings, retry_delay
from saccade.types import Delta, Generation
from saccade.v1 import inference_pb2


class AsyncStream(AsyncIterator[Delta]):
    """An answer as it is written: `async for` gives its deltas, `await stream.final()` the whole.

    `async with` cancels the work on the server on leaving. Awaiting the stream itself sends the request without reading
    from it; the first read does so too.
    """

    def __init__(self, client: AsyncClient, build: Callable[[], inference_pb2.GenerateRequest], timeout: float | None):
        self._client = client
        self._build = build
        self._timeout = timeout
        self._assembler: Assembler | None = None
        self._deadline = Deadline(None)
        self._call: Any = None
        self._attempt = 0
        self._delivered = False
        self._closed = False
        self._generation: Generation | None = None

    def __await__(self) -> Generator[Any, None, Self]:
        return self._opened().__await__()

    async def _opened(self) -> Self:
        if self._assembler is None and not self._closed:
            # Reading files and encoding arrays takes time that the event loop does not have.
            request = await asyncio.to_thread(self._build)
            self._assembler = Assembler(request)
            self._deadline = self._client._deadline(self._timeout)
            self._call = self._client._open(request, self._deadline)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        await self._opened()
        try:
            while not self._closed:
                response = await self._next_response()
                if response is None:
                    break
                assert self._assembler is not None
                delta = self._assembler.take(response)
                if delta is not None:
                    return delta
        except BaseException:
            await self.close()
            raise
        if not self._closed:
            await self.close()
            assert self._assembler is not None
            self._generation = self._assembler.finish()
        raise StopAsyncIteration

    async def _next_response(self) -> inference_pb2.StreamGenerateResponse | None:
        """The next message, or None at the end; tries again where nothing has been delivered yet."""
        import grpc

        while True:
            try:
                response = await self._call.read()
                self._delivered = True
                return None if response is grpc.aio.EOF else response
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error, request_id=self.request_id)
            except asyncio.CancelledError:
                # grpc.aio reports a call that was cancelled by a close() in the same way as a task that was cancelled.
                if (self._closed or self._client._closed) and not _task_is_cancelled():
                    raise Cancelled("the stream has been closed", request_id=self.request_id) from None
                raise
            if self._delivered:
                raise error from error.__cause__
            self._attempt += 1
            await self._client._wait_or_raise(error, self._attempt, self._deadline)
            assert self._assembler is not None
            self._call = self._client._open(self._assembler.request, self._deadline)

    @property
    def request_id(self) -> str:
        """Empty until the request has been built, by awaiting or reading the stream."""
        return self._assembler.request.request_id if self._assembler else ""

    @property
    def text(self) -> str:
        """The first sample's text so far."""
        return self._assembler.text() if self._assembler else ""

    @property
    def token_ids(self) -> list[int]:
        """The first sample's token ids so far."""
        return self._assembler.token_ids() if self._assembler else []

    @property
    def seed(self) -> int | None:
        """The seed in use, once the stream's first message has come."""
        return self._assembler.started.seed if self._assembler and self._assembler.started else None

    async def final(self) -> Generation:
        """Reads the stream to its end and returns the whole answer.

        Raises:
            Cancelled: the stream was closed before its end.
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


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


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
        max_retries: int = 2,
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

    def _set_up(self, settings: Settings) -> None:
        self._settings = settings
        self._channel: Any = None
        self._stub: Any = None
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None
        self._closed = False

    def __getstate__(self) -> Settings:
        return self._settings

    def __setstate__(self, settings: Settings) -> None:
        self._set_up(settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address!r})"

    async def generate(
        self,
        prompt: Prompt,
        *,
        images: Iterable[ImageInput] | ImageInput = (),
        videos: Sequence[Any] = (),
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
        videos: Sequence[Any] = (),
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
    ) -> AsyncStream:
        """The answer as it is written: `async for delta in client.stream(...)`; awaiting it first works too. See
        `saccade.Client.stream`."""

        def build() -> inference_pb2.GenerateRequest:
            return build_request(
                prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
                max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
                logprobs=logprobs, **sampling,
            )  # fmt: skip

        return AsyncStream(self, build, timeout)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse:
        import grpc

        deadline = self._deadline(timeout)
        attempt = 0
        while True:
            stub = self._inference()
            try:
                response: inference_pb2.GenerateResponse = await stub.Generate(
                    request, timeout=deadline.remaining(), metadata=self._settings.call_metadata()
                )
                return response
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error, request_id=request.request_id)
            except asyncio.CancelledError:
                if self._closed and not _task_is_cancelled():
                    raise Cancelled("the client has been closed", request_id=request.request_id) from None
                raise
            attempt += 1
            await self._wait_or_raise(error, attempt, deadline)

    def _open(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> Any:
        return self._inference().StreamGenerate(
            inference_pb2.StreamGenerateRequest(request=request),
            timeout=deadline.remaining(),
            metadata=self._settings.call_metadata(),
        )

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._settings.timeout if timeout is None else timeout)

    async def _wait_or_raise(self, error: SaccadeError, attempt: int, deadline: Deadline) -> None:
        delay = retry_delay(error, attempt, self._settings.max_retries, deadline)
        if delay is None:
            raise error from error.__cause__
        await asyncio.sleep(delay)

    def _inference(self) -> Any:
        if self._closed:
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._stub is None or self._owner != owner:
            import grpc

            from saccade.v1 import inference_pb2_grpc

            if self._channel is not None:
                # It belongs to another process or to a loop that is over: neither lets it be closed from here.
                _left_to_the_parent.append((self._channel, self._stub))
            options = self._settings.all_channel_options()
            if self._settings.tls is None:
                self._channel = grpc.aio.insecure_channel(self._settings.address, options)
            else:
                credentials = channel_credentials(self._settings.tls)
                self._channel = grpc.aio.secure_channel(self._settings.address, credentials, options)
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
            self._owner = owner
        return self._stub

    async def close(self) -> None:
        """Closes the connection; calls that are still running end as Cancelled. May be called any number of times."""
        channel, self._channel, self._stub = self._channel, None, None
        self._closed = True
        if channel is not None:
            if self._owner == (os.getpid(), asyncio.get_running_loop()):
                await channel.close()
            else:
                _left_to_the_parent.append(channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
