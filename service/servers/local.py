"""Engine and frontend without a server, for `saccade.LocalClient`: messages are passed within this process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeAlias, TypeVar

from saccade.v1 import inference_pb2, model_pb2
from service.answers import convert
from service.answers.frontend import Frontend
from service.common import errors
from service.common.config import ConfigError, ServerOptions
from service.common.settings import from_keywords
from service.engine.engine_thread import EngineThread
from service.media.patches import local_processor
from service.model.hub import fetched
from service.servers.from_options import frontend_limits, load_assets

SERVER_ONLY = re.compile(
    "host|port|frontends|insecure|api_keys|admin|vllm_engine|otlp_endpoint|sizes_file|log_json|"
    "(tls|max_connection|media|batch|metrics|http)_.*"
)
"""Names of options that have no effect without a server."""

T = TypeVar("T")
Message: TypeAlias = inference_pb2.StreamGenerateResponse | errors.StatusError | None


class LocalService:
    """Owns a thread with an event loop, and the engine's threads. Methods can be called from any thread."""

    def __init__(
        self, model: str = "demo", dtype: str | None = None, device: str | None = None, **options: Any
    ) -> None:
        """`options`: options of the server by name. Raises InvalidArgument for invalid ones."""
        try:
            for name, value in options.items():
                if value is not None and SERVER_ONLY.fullmatch(name):
                    raise ConfigError(f"{name}: only `saccade serve` uses this option; leave it out of a LocalClient")
            named = from_keywords(ServerOptions, {"model": model, "dtype": dtype, "device": device, **options})
            self.options = fetched(named)
            assets = load_assets(self.options)
            engine = EngineThread(self.options)
        except ValueError as error:  # ConfigError, CheckpointError and errors of the runners
            raise errors.InvalidArgument(str(error)) from error
        limits = frontend_limits(self.options)
        self._frontend = Frontend(
            engine,
            assets,
            limits,
            workers=self.options.image_workers,
            processor=local_processor(limits.media, assets.vision, engine.info.dtype),
        )
        self._model = convert.model_to_proto(engine.info, assets, limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="saccade-local", daemon=True)
        self._thread.start()
        self._closed = False
        self._closing = threading.Lock()
        """Held while a coroutine is started, so that none is after the loop has been told to end."""
        self._run(self._start()).result()

    async def _start(self) -> None:
        self._frontend.start()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the service's loop. Cancelling the future cancels the coroutine."""
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise errors.FailedPrecondition("this client is closed", reason="CLOSED")

    def begin(self, method: str, request: Any, timeout: float | None = None) -> LocalCall:
        """Starts one of the unary methods of the gRPC services: Generate, Embed, Tokenize, GetModel, ListModels."""
        answers: dict[str, Callable[[Any], Coroutine[Any, Any, Any]]] = {
            "Generate": self._generate,
            "Embed": self._embed,
            "Tokenize": self._tokenize,
            "GetModel": self._get_model,
            "ListModels": self._list_models,
        }
        if method not in answers:
            raise errors.Unimplemented(f"{method} needs a server; a LocalClient does not have this method")

        async def limited() -> Any:
            async with asyncio.timeout(timeout):
                return await answers[method](request)

        return LocalCall(self._run(_as_status(limited())))

    async def _generate(self, request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateResponse:
        builder = convert.ResponseBuilder()
        async with contextlib.aclosing(self._frontend.stream(convert.spec_from_proto(request, whole=True))) as events:
            async for event in events:
                builder.add(event)
        return builder.response()

    async def _embed(self, request: inference_pb2.EmbedRequest) -> inference_pb2.EmbedResponse:
        return convert.embedded_to_proto(await self._frontend.embed(convert.spec_from_embed(request)))

    async def _tokenize(self, request: inference_pb2.TokenizeRequest) -> inference_pb2.TokenizeResponse:
        return convert.tokenized_to_proto(await self._frontend.tokenize(convert.spec_from_tokenize(request)))

    async def _get_model(self, request: model_pb2.GetModelRequest) -> model_pb2.GetModelResponse:
        if request.name not in ("", self._model.name):
            raise errors.NotFound(f"no model {request.name!r}; this engine has {self._model.name!r}", field="name")
        return model_pb2.GetModelResponse(model=self._model)

    async def _list_models(self, request: model_pb2.ListModelsRequest) -> model_pb2.ListModelsResponse:
        return model_pb2.ListModelsResponse(models=[self._model])

    def stream(self, request: inference_pb2.GenerateRequest, timeout: float | None = None) -> LocalStream:
        """Starts a streamed answer."""
        messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with asyncio.timeout(timeout):
                    spec = convert.spec_from_proto(request)
                    async with contextlib.aclosing(self._frontend.stream(spec, timeout=timeout)) as events:
                        async for event in events:
                            messages.put(convert.event_to_proto(event))
                messages.put(None)
            except asyncio.CancelledError:
                messages.put(errors.Cancelled("the stream has been closed"))
                raise
            except Exception as error:  # raised again where the stream is read
                messages.put(errors.to_status(error))

        return LocalStream(self._run(pump()), messages)

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests."""
        return not self._closed and self._frontend.engine.alive

    def stats(self, *, integrity: bool = False) -> dict[str, Any]:
        """The engine's counters. `integrity`: checks every pool first, and raises AssertionError with what is wrong."""
        return self._frontend.engine.query("integrity" if integrity else "stats").result()

    def close(self) -> None:
        """Stops the engine and its threads; running calls end as cancelled. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._frontend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LocalCall:
    """One unary call. Methods can be called from any thread."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def result(self) -> Any:
        """Waits for the answer. Raises StatusError."""
        try:
            return self._future.result()
        except CancelledError:
            raise errors.Cancelled("the call was cancelled") from None

    def cancel(self) -> None:
        """Frees what the request holds. Idempotent."""
        self._future.cancel()


class LocalStream:
    """The messages of one answer. `cancel` can be called from any thread."""

    def __init__(self, future: Future[None], messages: queue.SimpleQueue[Message]) -> None:
        self._future, self._messages = future, messages

    def receive(self, patience: float | None = None) -> inference_pb2.StreamGenerateResponse | None:
        """The next message; None at the end. Raises StatusError, and TimeoutError after `patience` seconds."""
        try:
            message = self._messages.get(timeout=patience)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(message, errors.StatusError):
            self._messages.put(message)  # for further calls of this method
            raise message
        return message

    def cancel(self) -> None:
        """Frees what the request holds. Idempotent."""
        if self._future.cancel():
            # If the coroutine has not started, nothing else wakes the reader.
            self._messages.put(errors.Cancelled("the stream has been closed"))


async def _cancel_all() -> None:
    """Cancels the tasks on the loop and waits until they have ended: none may be pending when the loop closes."""
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()


async def _as_status(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except asyncio.CancelledError:
        raise
    except Exception as error:
        raise errors.to_status(error) from error
