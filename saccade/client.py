"""The synchronous client, and what it shares with the one that needs no server."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from saccade._core.images import ImageInput
from saccade._core.mapping import check_concurrency, map_sync, outcome, prepare_mapping
from saccade._core.methods import (
    embed_image_steps,
    embed_steps,
    generate_steps,
    get_model_steps,
    models_steps,
    one_call,
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
from saccade._core.retrying import Deadline
from saccade._core.settings import CallOptions, CallSettings, Settings, TLSConfig, make_settings
from saccade._core.steps import Call, Steps
from saccade._core.uploads import Uploads
from saccade._core.videos import VideoInput
from saccade._transport.channel import channel_credentials, stub_class
from saccade._transport.watchdog import Watchdog
from saccade.calls import Attempts, Responses, Stream, UnaryCall
from saccade.errors import Cancelled, FailedPrecondition, Unimplemented, error_from_rpc
from saccade.jobs import SyncBatches
from saccade.media import SyncMedia
from saccade.types import Embedding, Generation, Model, Outcome, Tensor, Tokens
from saccade.v1 import inference_pb2

T = TypeVar("T")

if TYPE_CHECKING:
    import grpc

    from saccade._jobs.job import BatchSummary

# Channels that a fork has copied into this process: closing them, or letting them be collected, would disturb the
# connections of the process they belong to.
_left_to_the_parent: list[Any] = []


class SyncClient(ABC):
    """The methods of `Client` and `LocalClient`; what carries a request to an engine is in the subclasses."""

    def generate(
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
        """Asks the model and waits for the whole answer.

        Args:
            prompt: a string, put through the model's chat template as a user's message (`raw=True` takes it as it is);
                or a list of chat messages `{"role": ..., "content": ...}`, whose content is a string or a list of parts
                `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`; or a list of token ids, taken as
                they are, with one image token id for each picture.
            images: paths, encoded bytes, binary files, Pillow images or uint8 arrays `[H, W, C]`. With a string they
                come before the text; with chat messages they fill the image parts that hold no picture.
            videos: paths or bytes of GIF, APNG, WebP, MP4 or WebM files, lists of frames (each as in `images`), or
                `saccade.Video`, which says more of a clip. They come after the images.
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
        response = self._attempts(request, timeout).result()
        return generation_from(response, request.sampling.HasField("logprobs"))

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
    ) -> Stream:
        """Asks the model and returns the answer as it is written. Arguments and errors are those of `generate`; an
        error of the server is raised while the stream is read.

        Args:
            first_token_timeout, idle_timeout: seconds that a reader waits for the first piece and for each further one;
                None takes the client's. Longer, and it is DeadlineExceeded, with the name as its reason.
            resume: go on where the stream broke off, if the server or its engine went away; see `Stream`.
        """
        request = build_request(
            prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs,
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop,
            logprobs=logprobs, **sampling,
        )  # fmt: skip
        calls = stream_settings(self._call_settings, first_token_timeout, idle_timeout)
        deadline = self._deadline(timeout)
        uploads = Uploads(request, calls.upload_above)
        self._drive(uploads.steps(), deadline)
        state = StreamState(request, calls, deadline, resume, uploads)
        return Stream(state, self._open, lambda steps: self._drive(steps, deadline))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Asks for the next message of a conversation; `messages.append(answer.message)` goes on from there.

        Args:
            messages: chat messages as `generate` takes them; a string is one message of the user.
            system: the system's message, in front of the others.
            options: those of `generate`.
        """
        return self.generate(chat_messages(messages, system), **options)

    def embed(
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
        """The model's hidden states for a prompt, as `generate` would read it.

        Two prompts that mean the same need not be near each other: these are the states of a model that writes, not
        of one that was trained to compare. `last` is what the next token would be drawn from.
        """
        request = embed_request(
            prompt,
            images=images,
            videos=videos,
            raw=raw,
            chat_template_kwargs=chat_template_kwargs,
            model=model,
            priority=priority,
        )
        return self._steps(embed_steps(request, self._call_settings.upload_above), timeout)

    def embed_image(self, image: ImageInput, *, model: str = "", timeout: float | None = None) -> Tensor:
        """A picture's tokens behind the projector, as the decoder reads them: `[image tokens, hidden size]`."""
        request = embed_image_request(image, model=model)
        return self._steps(embed_image_steps(request, self._call_settings.upload_above), timeout)

    def tokenize(
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
        request = tokenize_request(
            prompt, images=images, videos=videos, raw=raw, chat_template_kwargs=chat_template_kwargs, model=model
        )
        return self._steps(tokenize_steps(request, self._call_settings.upload_above), timeout)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that are served."""
        return self._steps(models_steps(), timeout)

    def get_model(self, name: str = "", *, timeout: float | None = None) -> Model:
        """A model with its limits; without a name, the only one.

        Raises:
            NotFound: there is none of that name.
        """
        return self._steps(get_model_steps(name), timeout)

    def map(
        self, requests: Iterable[Mapping[str, Any]], *, concurrency: int = 32, ordered: bool = False
    ) -> Iterator[Outcome]:
        """Answers many requests, `concurrency` of them at a time, in memory that does not grow with their number.

        Args:
            requests: mappings with the arguments of `generate`, and a custom_id if you like. They are taken as there is
                room for them, in a thread of their own: a source that waits, even for an outcome, holds nothing up.
            ordered: in the order of the requests instead of as they come; a slow one then holds back those behind it.

        Returns:
            An iterator of outcomes. A request that failed is an outcome with an error, not an exception. Leaving the
            iterator cancels what is running.
        """
        check_concurrency(concurrency)
        return self._map(requests, concurrency, ordered)

    def _map(self, requests: Iterable[Mapping[str, Any]], concurrency: int, ordered: bool) -> Iterator[Outcome]:
        with closing(
            map_sync(self, requests, prepare_mapping, concurrency=concurrency, ordered=ordered)
        ) as results:  # fmt: skip
            for index, request, result in results:
                yield outcome(index, request, result)

    def run_batch(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        *,
        max_retries: int | None = 8,
        **options: Any,
    ) -> BatchSummary:
        """Answers a file of requests in OpenAI's batch format into another; see `saccade batch`.

        The file is checked whole before the first request. A run that was stopped, however, goes on where it was when
        it is started again with the same arguments. Rows that fail are rows of the output, not exceptions; so are rows
        that name a file which cannot be read, unless `strict=True`.

        Args:
            source, output: paths. Pictures may be named by paths inside the source's folder.
            max_retries: how often a row is tried again while the server is unavailable; None: as often as its timeout
                allows.
            options: the fields of `BatchOptions`.

        Raises:
            InvalidArgument: the source is wrong; `problems` of the error has a sentence for each line.
            AlreadyExists: the output holds something else than answers to this source with this model.
            FailedPrecondition: another process is writing the output, there were too many errors, or it cannot be
                written.
            Unavailable: nobody answers any more; starting it again goes on.
        """
        from saccade._jobs.job import BatchJob, BatchOptions, run_sync

        job = BatchJob(source, output, BatchOptions.of(options))
        job.check()
        with self.with_options(max_retries=max_retries) as client:
            return run_sync(client, job)

    @property
    def media(self) -> SyncMedia:
        """Uploaded pictures."""
        return SyncMedia(self)

    @property
    def batches(self) -> SyncBatches:
        """Batches that the server works on by itself."""
        return SyncBatches(self)

    def _steps(self, steps: Steps[T], timeout: float | None) -> T:
        return self._drive(steps, self._deadline(timeout))

    def _drive(self, steps: Steps[T], deadline: Deadline) -> T:
        result: T = self._over(steps, deadline).result()
        return result

    def _over(self, steps: Steps[Any], deadline: Deadline) -> Attempts:
        return Attempts(
            lambda call, left: self._begin(call.service, call.method, call.message, left),
            steps,
            self._call_settings,
            deadline,
        )

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._call_settings.timeout if timeout is None else timeout)

    def _attempts(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Attempts:
        return self._over(generate_steps(request, self._call_settings.upload_above), self._deadline(timeout))

    def _unary(self, service: str, method: str, message: Any, timeout: float | None) -> Any:
        return self._steps(one_call(Call(service, method, message)), timeout)

    @property
    @abstractmethod
    def _call_settings(self) -> CallSettings: ...

    @abstractmethod
    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """A copy with other settings for its calls: timeout, max_retries, first_token_timeout, idle_timeout. It shares
        the connection or the engine of the client that it comes from, and closing it leaves that alone."""

    @abstractmethod
    def _begin(self, service: str, method: str, message: Any, timeout: float | None) -> UnaryCall: ...

    @abstractmethod
    def _open(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses: ...

    def _server_stream(self, service: str, method: str, message: Any) -> Responses:
        """The messages of a call that is none of a generation."""
        raise Unimplemented(f"{method} needs a server", reason="UNIMPLEMENTED")

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
        max_retries: how often a call that failed as UNAVAILABLE, or over its rate with a time to wait, is tried again;
            None: as often as the timeout allows. A stream that breaks off is continued.
        channel_options: further gRPC channel options, over the client's own.
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

    def _set_up(self, settings: Settings, origin: Client | None = None) -> None:
        self._settings = settings
        self._origin = origin
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stubs: dict[str, Any] = {}
        self._pid = os.getpid()
        self._closed = False

    def __getstate__(self) -> Settings:
        return self._settings

    def __setstate__(self, settings: Settings) -> None:
        self._set_up(settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings.address!r})"

    @property
    def _call_settings(self) -> CallSettings:
        return self._settings.calls

    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        copy = type(self).__new__(type(self))
        copy._set_up(replace(self._settings, calls=self._settings.calls.changed(**options)), self._origin or self)
        return copy

    def close(self) -> None:
        """Closes the connection; calls that are still running end as Cancelled. May be called any number of times."""
        with self._lock_of_this_process():
            channel, self._channel = self._channel, None
            self._stubs = {}
            self._closed = True
        if channel is not None:
            channel.close()

    def _lock_of_this_process(self) -> threading.Lock:
        if self._pid != os.getpid():
            # A fork copied this object, its lock in whatever state a thread of the parent held it.
            self._pid = os.getpid()
            self._lock = threading.Lock()
            _left_to_the_parent.append((self._channel, self._stubs))
            self._channel, self._stubs = None, {}
        return self._lock

    def _stub(self, service: str) -> Any:
        with self._lock_of_this_process():
            if self._closed:
                raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED")
            if self._origin is None:
                if service not in self._stubs:
                    self._stubs[service] = stub_class(service)(self._connected())
                return self._stubs[service]
        return self._origin._stub(service)

    def _connected(self) -> grpc.Channel:
        if self._channel is None:
            import grpc

            options = self._settings.all_channel_options()
            if self._settings.tls is None:
                self._channel = grpc.insecure_channel(self._settings.address, options)
            else:
                credentials = channel_credentials(self._settings.tls)
                self._channel = grpc.secure_channel(self._settings.address, credentials, options)
        return self._channel

    def _begin(self, service: str, method: str, message: Any, timeout: float | None) -> UnaryCall:
        call = self._start(getattr(self._stub(service), method).future, message, timeout)
        return _GrpcCall(call, getattr(message, "request_id", ""))

    def _server_stream(self, service: str, method: str, message: Any) -> Responses:
        return _GrpcResponses(self._start(getattr(self._stub(service), method), message, None), "")

    def _open(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Responses:
        message = inference_pb2.StreamGenerateRequest(request=request)
        call = self._start(self._stub("inference").StreamGenerate, message, timeout)
        return _GrpcResponses(call, request.request_id)

    def _start(self, rpc: Any, message: Any, timeout: float | None) -> Any:
        try:
            message = message() if callable(message) else message
            return rpc(message, timeout=timeout, metadata=self._settings.call_metadata())
        except ValueError as error:
            # gRPC's word for a channel that another thread has closed in between.
            raise FailedPrecondition("the client has been closed", reason="CLIENT_CLOSED") from error


class _GrpcCall:
    """One unary call."""

    def __init__(self, call: Any, request_id: str) -> None:
        self._call = call
        self._request_id = request_id

    def result(self) -> Any:
        import grpc

        try:
            return self._call.result()
        except grpc.RpcError as rpc_error:
            error = error_from_rpc(rpc_error, request_id=self._request_id)
            raise error from rpc_error
        except grpc.FutureCancelledError:
            raise Cancelled("the call was cancelled", request_id=self._request_id) from None

    def cancel(self) -> None:
        self._call.cancel()


class _GrpcResponses:
    """The messages of one streaming call."""

    def __init__(self, call: Any, request_id: str) -> None:
        self._call = call
        self._request_id = request_id
        self._watchdog: Watchdog | None = None

    def receive(self, patience: float | None) -> Any:
        import grpc

        watchdog = self._watchdog
        if patience is not None:
            watchdog = self._watchdog = watchdog or Watchdog(self._call)
            watchdog.arm(patience)
        try:
            return next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError as rpc_error:
            if watchdog is not None and watchdog.expired:
                raise TimeoutError from rpc_error
            error = error_from_rpc(rpc_error, request_id=self._request_id)
            raise error from rpc_error
        finally:
            if watchdog is not None:
                watchdog.disarm()

    def close(self) -> None:
        self._call.cancel()
        if self._watchdog is not None:
            self._watchdog.stop()
