"""The same engine and front without a server, for `saccade.LocalClient`: protos in, protos out, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from saccade.v1 import inference_pb2, model_pb2
from service import convert, errors
from service.build import build_engine
from service.config import ServerOptions, from_keywords
from service.frontend import Frontend
from service.server import front_limits, load_assets
from service.types import Event

T = TypeVar("T")


class LocalService:
    """Owns a thread with an event loop and, behind it, the engine's threads. Methods may be called from any thread."""

    def __init__(
        self, model: str = "demo", dtype: str | None = None, device: str | None = None, **options: Any
    ) -> None:
        """`options`: any option of the server by name. Raises InvalidArgument with what would work instead."""
        try:
            self.options = from_keywords(ServerOptions, {"model": model, "dtype": dtype, "device": device, **options})
            assets = load_assets(self.options)
            engine = build_engine(self.options)
        except ValueError as error:  # ConfigError, CheckpointError and the runners' own refusals
            raise errors.InvalidArgument(str(error)) from error
        limits = front_limits(self.options)
        self._frontend = Frontend(engine, assets, limits, workers=self.options.image_workers)
        self._model = convert.model_to_proto(engine.info, assets, limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="saccade-local", daemon=True)
        self._thread.start()
        self._closed = False
        self._run(self._start())

    async def _start(self) -> None:
        self._frontend.start()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine on the service's loop; an interrupt of the caller cancels it."""
        if self._closed:
            coroutine.close()
            raise errors.FailedPrecondition("this client is closed", reason="CLOSED")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None = None
    ) -> inference_pb2.GenerateResponse:
        """The whole answer. Raises StatusError."""

        async def collect() -> inference_pb2.GenerateResponse:
            builder = convert.ResponseBuilder()
            async with contextlib.aclosing(self._events(request, timeout)) as events:
                async for event in events:
                    builder.add(event)
            return builder.response()

        return self._run(_as_status(collect()))

    def stream(
        self, request: inference_pb2.GenerateRequest, timeout: float | None = None
    ) -> Iterator[inference_pb2.StreamGenerateResponse]:
        """The events of the answer. Closing the iterator frees what the request holds. Raises StatusError."""
        events = self._events(request, timeout)
        try:
            while (event := self._run(_as_status(_next(events)))) is not None:
                yield convert.event_to_proto(event)
        finally:
            if not self._closed:
                self._run(events.aclose())

    async def _events(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[Event, None]:
        spec = convert.spec_from_proto(request)
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        async with contextlib.aclosing(self._frontend.stream(spec)) as events:
            iterator = aiter(events)
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        event = await anext(iterator)
                except StopAsyncIteration:
                    return
                yield event

    def get_model(self) -> model_pb2.Model:
        """What the model takes and gives."""
        return self._model

    def stats(self, *, integrity: bool = False) -> dict[str, Any]:
        """The engine's counters; with `integrity`, after checking every pool (AssertionError names what is wrong)."""
        return self._frontend.engine.query("integrity" if integrity else "stats").result()

    def close(self) -> None:
        """Stops the engine and its threads. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._frontend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _as_status(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except asyncio.CancelledError:
        raise
    except Exception as error:
        raise errors.to_status(error) from error


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    try:
        return await anext(events)
    except StopAsyncIteration:
        return None
