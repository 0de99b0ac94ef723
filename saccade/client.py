"""The synchronous client, and what it shares with the one that needs no server."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

from saccade.errors import Cancelled, FailedPrecondition, SaccadeError, error_from_rpc
from saccade.images import ImageInput
from saccade.requests import Prompt, Sampling, build_request
from saccade.results import Assembler, generation_from
from saccade.transport import Deadline, Settings, TLSConfig, channel_credentials, make_settings, retry_delay
from saccade.types import Delta, Generation
from saccade.v1 import inference_pb2

if TYPE_CHECKING:
    import grpc

# Channels that a fork has copied into this process: closing them, or letting them be collected, would disturb the
# connections of the process they belong to.
_left_to_the_parent: list[Any] = []


class Responses(Protocol):
    """The messages of one stream. `close` may be called from any thread, at any time and more than once; it cancels."""

    def __iter__(self) -> Iterator[inference_pb2.StreamGenerateResponse]: ...

    def __next__(self) -> inference_pb2.StreamGenerateResponse: ...

    def close(self) -> None: ...


class Stream(Iterator[Delta]):
    """An answer as it is written.

    Iterating gives its deltas; `final()` reads the rest and gives the whole. As a context manager it cancels the work
    on the server on leaving, unless the answer is complete; so does `close()`, which another thread may call too.
    """

    def __init__(self, assembler: Assembler, responses: Responses) -> None:
        self._assembler = assembler
        self._responses = responses
        self._closed = False
        self._generation: Generation | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._closed:
            raise StopIteration
        try:
            for response in self._responses:
                delta = self._assembler.take(response)
                if delta is not None:
                    return delta
        except BaseException:
            self.close()
            raise
        self.close()
        self._generation = self._assembler.finish()
        raise StopIteration

    @property
    def request_id(self) -> str:
        return self._assembler.request.request_id

    @property
    def text(self) -> str:
        """The first sample's text so far."""
        return self._assembler.text()

    @property
    def token_ids(self) -> list[int]:
        """The first sample's token ids so far."""
        return self._assembler.token_ids()

    @property
    def seed(self) -> int | None:
        """The seed in use, once the stream's first message has come."""
        return self._assembler.started.seed if self._assembler.started else None

    def final(self) -> Generation:
        """Reads the stream to its end and returns the whole answer.

        Raises:
            Cancelled: the stream was closed before its end.
        """
        for _ in self:
            pass
        if self._generation is None:
            raise Cancelled("the stream was closed before its end", request_id=self.request_id)
        return self._generation

    def close(self) -> None:
        """Cancels what is still running; what has come so far stays readable."""
        if not self._closed:
            self._closed = True
            self._responses.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncClient(ABC):
    """The methods of `Client` and `LocalClient`; what carries a request to an engine is in the subclasses."""

    def generate(
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
        """Asks the model and waits for the whole answer.

        Args:
            prompt: a string, put through the model's chat template as a user's message (`raw=True` takes it as it is);
                or a list of chat messages `{"role": ..., "content": ...}`, whose content is a string or a list of parts
                `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`; or a list of token ids, taken as
                they are, with one image token id for each picture.
            images: paths, encoded bytes, binary files, Pillow images or uint8 arrays `[H, W, C]`. With a string they
                come before the text; with chat messages they fill the image parts that hold no picture.
            max_tokens, temperature, top_p, top_k, seed, stop, logprobs: None leaves each to the model's defaults;
                temperature 0 is greedy; logprobs=k also returns the k likeliest tokens in each place.
            timeout: seconds for the whole call, retries included; None takes the client's.
            chat_template_kwargs: further arguments of the chat template.
            sampling: min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, min_tokens,
                stop_token_ids, ignore_eos, n, continued_token_ids, model, request_id, priority.

        Raises:
            SaccadeError: one of its subclasses, see `saccade.errors`.
        """
        request = build_request(
            prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
            logprobs=logprobs, **sampling,
        )  # fmt: skip
        return generation_from(self._generate(request, timeout), request.sampling.HasField("logprobs"))

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
    ) -> Stream:
        """Asks the model and returns the answer as it is written. Arguments and errors are those of `generate`; an
        error of the server is raised while the stream is read."""
        request = build_request(
            prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
            logprobs=logprobs, **sampling,
        )  # fmt: skip
        return Stream(Assembler(request), self._stream(request, timeout))

    @abstractmethod
    def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse: ...

    @abstractmethod
    def _stream(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client(SyncClient):
    """A connection to a server, made when it is first used. Threads may share one.

    Copies of it in a forked or spawned process make connections of their own.

    Args:
        address: "host:port", or any gRPC target such as "unix:/path".
        api_key: sent with each call; without one the environment's SACCADE_API_KEY is taken.
        tls: True for the system's certificates, or a `TLSConfig`; None for plain text.
        timeout: seconds for a whole call, retries included; None for no limit.
        max_retries: how often a call that failed as UNAVAILABLE, or over its rate with a time to wait, is tried again.
            A stream is only tried again before its first message.
        channel_options: further gRPC channel options, over the client's own.
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
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._pid = os.getpid()
        self._closed = False

    def __getstate__(self) -> Settings:
        return self._settings

    def __setstate__(self, settings: Settings) -> None:
        self._set_up(settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address!r})"

    def close(self) -> None:
        """Closes the connection; calls that are still running end as Cancelled. May be called any number of times."""
        with self._lock_of_this_process():
            channel, self._channel, self._stub = self._channel, None, None
            self._closed = True
        if channel is not None:
            channel.close()

    def _lock_of_this_process(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A fork copied this object, its lock in whatever state a thread of the parent held it.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            _left_to_the_parent.append((self._channel, self._stub))
            self._channel = self._stub = None
        return self._lock

    def _inference(self) -> Any:
        with self._lock_of_this_process():
            if self._closed:
                raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
            if self._stub is None:
                import grpc

                from saccade.v1 import inference_pb2_grpc

                options = self._settings.all_channel_options()
                if self._settings.tls is None:
                    self._channel = grpc.insecure_channel(self._settings.address, options)
                else:
                    credentials = channel_credentials(self._settings.tls)
                    self._channel = grpc.secure_channel(self._settings.address, credentials, options)
                self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
            return self._stub

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._settings.timeout if timeout is None else timeout)

    def _wait_or_raise(self, error: SaccadeError, attempt: int, deadline: Deadline) -> None:
        delay = retry_delay(error, attempt, self._settings.max_retries, deadline)
        if delay is None:
            raise error from error.__cause__
        time.sleep(delay)

    def _start(self, method: str, message: Any, deadline: Deadline) -> Any:
        """Starts a unary or server-streaming call; returns its result (a future, or an iterator of messages)."""
        stub = self._inference()
        rpc = getattr(stub, method)
        start = rpc.future if method == "Generate" else rpc
        try:
            return start(message, timeout=deadline.remaining(), metadata=self._settings.call_metadata())
        except ValueError as error:
            # gRPC's word for a channel that another thread has closed in between.
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED") from error

    def _generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> inference_pb2.GenerateResponse:
        import grpc

        deadline = self._deadline(timeout)
        attempt = 0
        while True:
            call = self._start("Generate", request, deadline)
            try:
                response: inference_pb2.GenerateResponse = call.result()
                return response
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error, request_id=request.request_id)
            except grpc.FutureCancelledError:
                raise Cancelled("the client has been closed", request_id=request.request_id) from None
            except BaseException:
                # An interrupt from the keyboard, say: the server need not finish what nobody waits for.
                call.cancel()
                raise
            attempt += 1
            self._wait_or_raise(error, attempt, deadline)

    def _stream(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses:
        return _GrpcResponses(self, request, self._deadline(timeout))


class _GrpcResponses:
    """The messages of one streaming call. It is open from the start, so that the server works while the caller gets
    ready to read, and opened again while nothing has been delivered and the error allows it."""

    def __init__(self, client: Client, request: inference_pb2.GenerateRequest, deadline: Deadline) -> None:
        self._client = client
        self._request = request
        self._deadline = deadline
        self._attempt = 0
        self._delivered = False
        self._closed = False
        self._call = self._open()

    def _open(self) -> Any:
        return self._client._start(
            "StreamGenerate", inference_pb2.StreamGenerateRequest(request=self._request), self._deadline
        )

    def __iter__(self) -> Iterator[inference_pb2.StreamGenerateResponse]:
        return self

    def __next__(self) -> inference_pb2.StreamGenerateResponse:
        import grpc

        while True:
            try:
                response: inference_pb2.StreamGenerateResponse = next(self._call)
                self._delivered = True
                return response
            except grpc.RpcError as rpc_error:
                error = error_from_rpc(rpc_error, request_id=self._request.request_id)
            if self._delivered or self._closed:
                raise error from error.__cause__
            self._attempt += 1
            self._client._wait_or_raise(error, self._attempt, self._deadline)
            self._call = self._open()
            if self._closed:
                self._call.cancel()

    def close(self) -> None:
        self._closed = True
        self._call.cancel()
