"""`saccade serve --role encoder`: an encoder, its handoff, and the port to which decoders connect.

All of it is one process, because the encoder's work consists of a few large operations, between which the event loop
can run. The encoder runs on the thread that built it (service/engine/engine.py says why).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc

from kernels.host_memory import release_program_pages
from saccade.v1 import encoder_pb2_grpc
from service.answers.door import Door
from service.common.auth import Guard, watch_keys
from service.common.config import EngineOptions, ServerOptions
from service.encoding.encoder import LocalEncoder
from service.encoding.encoder_servicer import EncoderServicer
from service.encoding.handoff import Handoff
from service.encoding.partner import Partner
from service.engine.build import build_encoder, check_decoders
from service.model.checkpoint import Checkpoint
from service.model.resolve import checkpoint_of
from service.rpc.interceptor import DoorInterceptor
from service.servers.credentials import server_credentials
from service.servers.exposure import channel_options, check_exposure, listen
from service.servers.from_options import byte_budget, door_limits
from service.servers.health import SetHealth, add_standard_services
from service.servers.lifetime import stop_signals, until_stopped
from service.telemetry.access_log import AccessLog
from service.telemetry.metrics import make_metrics
from service.telemetry.sizes import SizesFile, check_sizes_file

log = logging.getLogger(__name__)


class EncoderThread:
    """Builds and runs an encoder, on one thread."""

    def __init__(
        self, options: EngineOptions, checkpoint: Checkpoint | None = None, *,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Raises ConfigError or CheckpointError. `checkpoint`: the options' model, if it is already open. `on_death` is
        called once, from the thread, if the encoder fails."""
        self._built: Future[tuple[LocalEncoder, Handoff, Partner]] = Future()
        self._on_death = on_death
        self.failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._main, args=(options, checkpoint), name="saccade-encoder", daemon=True
        )
        self._thread.start()
        self.encoder, self.handoff, self.partner = self._built.result()

    def stats(self) -> dict[str, Any]:
        return {
            "encode_seconds": self.encoder.seconds,
            "encoder": self.encoder.stats(),
            "handoff": self.handoff.stats(),
        }

    def close(self) -> None:
        """Stops after the current batch. Idempotent."""
        self.encoder.stop()
        self._thread.join()

    def _main(self, options: EngineOptions, checkpoint: Checkpoint | None) -> None:
        try:
            built = build_encoder(options, checkpoint)
        except BaseException as error:  # raised again in the constructor's caller
            self._built.set_exception(error)
            return
        self._built.set_result(built)
        encoder = built[0]
        encoder.run(self._fail)
        encoder.close()

    def _fail(self, error: BaseException) -> None:
        log.critical("the encoder stopped on an error", exc_info=error)
        self.failure = error
        self._on_death()


class EncoderServer:
    """The server that decoders connect to. Call `start`, then `stop`."""

    def __init__(self, options: ServerOptions, thread: EncoderThread) -> None:
        check_exposure(options)
        check_sizes_file(options)
        self.options, self._thread = options, thread
        self._sizes = None if options.sizes_file is None else SizesFile(Path(options.sizes_file))
        self._credentials = server_credentials(options)
        guard = Guard(watch_keys(options.api_keys) if options.api_keys else None)
        self.metrics = make_metrics()
        self.metrics.watch_engine(self._query, self._gauges)
        self._door = Door(
            guard, byte_budget(options), self.metrics, AccessLog(as_json=options.log_json), door_limits(options)
        )  # fmt: skip
        self._servicer: EncoderServicer | None = None
        self._server: grpc.aio.Server | None = None
        self._server_end: asyncio.Future[None] | None = None
        self._ends = contextlib.ExitStack()
        self._set_health: SetHealth = lambda serving, live=None: None
        self.port = self.metrics_port = 0

    async def start(self) -> None:
        """Starts to listen; health is SERVING on return. Raises ConfigError if the address cannot be bound."""
        loop, thread = asyncio.get_running_loop(), self._thread
        servicer = self._servicer = EncoderServicer(
            thread.handoff, thread.partner, window_bytes=self.options.max_inflight_bytes // self.options.max_decoders,
            max_sessions=self.options.max_decoders,
        )  # fmt: skip

        def on_change() -> None:
            thread.encoder.wake()
            with contextlib.suppress(RuntimeError):  # the loop may be closed at the end
                loop.call_soon_threadsafe(servicer.poll)

        thread.handoff.on_change = on_change
        server = grpc.aio.server(options=channel_options(self.options), interceptors=[DoorInterceptor(self._door)])
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, server)
        self._set_health = add_standard_services(server, ["saccade.v1.EncoderService"])
        self.port = listen(server, self.options, self._credentials)
        if self.options.metrics_port is not None:
            self.metrics_port, end = self.metrics.serve(self.options.metrics_host, self.options.metrics_port)
            self._ends.callback(end)
        await server.start()
        self._server = server
        self._set_health(True)

    async def stop(self, grace: float | None = None) -> None:
        """Tells decoders to send no more images, waits up to `grace` seconds for those in progress, then stops.
        Idempotent; may be cancelled and called again with less grace."""
        self._set_health(False)
        if self._servicer is not None:
            self._servicer.drain()
            seconds = self.options.grace if grace is None else grace
            if self._thread.failure is not None:  # images in progress would not end; decoders send them to others
                seconds = 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._servicer.idle.wait()
        if self._server is not None:
            # Once and to its end: gRPC may hang if its stop is cancelled and called again.
            self._server_end = asyncio.ensure_future(self._server.stop(grace=0))
            self._server = None
        if self._server_end is not None:
            await asyncio.shield(self._server_end)
        await asyncio.to_thread(self._thread.close)
        if self._sizes is not None:
            await self._sizes.record(self._thread.encoder.histogram())
        await asyncio.to_thread(self._ends.close)

    def _query(self) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        future.set_result(self._thread.stats())
        return future

    def _gauges(self) -> dict[str, float]:
        servicer = self._servicer
        return {
            "attached_decoders": len(servicer.sessions) if servicer else 0,
            "images_in_progress": servicer.in_progress if servicer else 0,
        }


async def serve_encoder(options: ServerOptions) -> int:
    """Runs an encoder until SIGTERM or SIGINT, or until it fails. Returns the exit code."""
    loop = asyncio.get_running_loop()
    stopping = stop_signals()

    def on_death() -> None:
        loop.call_soon_threadsafe(stopping.set)

    def build() -> EncoderThread:
        checkpoint = checkpoint_of(options)
        check_decoders(options, checkpoint)
        return EncoderThread(options, checkpoint, on_death=on_death)

    building = asyncio.create_task(asyncio.to_thread(build))
    await asyncio.wait({building, stopped := asyncio.create_task(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not building.done():
        log.info("stopping before the model is loaded")
        sys.stderr.flush()
        os._exit(0)  # nothing else ends the thread that loads the model
    thread = building.result()
    try:
        server = EncoderServer(options, thread)
        await server.start()
    except BaseException:
        thread.close()
        raise
    release_program_pages()
    await until_stopped(server, stopping, options)
    return 1 if thread.failure is not None else 0
