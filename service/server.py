"""The gRPC server: options, services, health, life and death.

Order at the end: health NOT_SERVING, new calls refused, running calls get their grace, then the engine stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import ipaddress
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc

from encoder.frames import VideoLimits, video_formats
from encoder.images import ImageLimits
from saccade._core.results import model_from
from saccade.v1 import (
    admin_pb2_grpc,
    batch_pb2_grpc,
    inference_pb2_grpc,
    media_pb2_grpc,
    model_pb2_grpc,
)
from service import convert, errors, kserve
from service.admin import AdminServicer
from service.assets import ModelAssets
from service.auth import Guard, watch_keys
from service.batch_runs import Uploaded
from service.batch_servicer import BatchServicer
from service.batch_store import BatchStore
from service.batches import Batches, BatchLimits
from service.bounds import FrontLimits
from service.build import resolve_vision
from service.calls import AccessLog, Calls
from service.checkpoint import open_checkpoint
from service.config import ConfigError, ServerOptions
from service.engine import EngineHandle, EngineInfo
from service.errors import EngineDied
from service.fetch import make_fetcher
from service.frontend import Frontend
from service.interceptor import DoorLimits, FrontDoor
from service.kserve import KServeServicer
from service.limits import ByteBudget, Places
from service.media import Spool
from service.meters import make_metrics
from service.picture_pool import PicturePool
from service.pictures import MediaLimits
from service.prepare import decoder_processes
from service.servicer import InferenceServicer, MediaServicer, ModelServicer, media_resolver
from service.sizes import check_sizes_file, record_sizes
from service.spans import Spans
from service.supervisor import SupervisedEngine
from service.tls import server_credentials
from service.warmup import warm_up
from service.weigh import MIN_IDS

log = logging.getLogger(__name__)

LIVENESS = "liveness"
"""Health service that says whether restarting this process would help: SERVING through drains, warm-ups and restarts
of the engine, until that is given up."""


class Server:
    """One listening server over one engine. `start`, then `wait` or `stop`."""

    has_batches = True

    def __init__(self, options: ServerOptions, engine: EngineHandle, assets: ModelAssets) -> None:
        check_exposure(options)
        check_sizes_file(options)
        self.options = options
        limits = front_limits(options)
        self.pictures = PicturePool(
            limits.media, decoder_processes(options.image_workers), image_seconds=options.image_timeout,
            video_seconds=options.video_timeout,
        )  # fmt: skip
        self.frontend = Frontend(engine, assets, limits, workers=options.image_workers, decoder=self.pictures)
        self._model = convert.model_to_proto(engine.info, assets, limits, options)
        fetcher = make_fetcher(options, limits.media)
        self._credentials = server_credentials(options)
        self._guard = Guard(watch_keys(options.api_keys) if options.api_keys else None, admin=options.admin)
        self.metrics, self.budget = make_metrics(), byte_budget(options)
        self.metrics.watch_engine(
            lambda: engine.query("stats"), self._gauges, lambda: {"preprocess": self.frontend.stats()}
        )
        _say_what_is_off(engine.info)
        access = AccessLog(as_json=options.log_json)
        self._ends = contextlib.ExitStack()
        self.calls = Calls(
            self.frontend, default_timeout=options.default_timeout, closed=self._refusal,
            metrics=self.metrics, access=access, spans=self._open_spans(),
            places=Places(options.max_tenant_requests or max(1, options.max_queue // 2), "requests"),
        )  # fmt: skip
        self._door = FrontDoor(
            self._guard, self.budget, self.metrics, access, door_limits(options, engine.info.max_len)
        )
        self.spool = self._open_spool(limits.media)
        self.frontend.resolve = media_resolver(self.spool, fetcher)
        self._batch_store = self._open_batches()
        self.batches: Batches | None = None
        self._draining = False
        self._warming = True
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._set_health: SetHealth = lambda serving, live=None: None
        self.port = 0
        self.metrics_port = 0

    async def start(self) -> None:
        """Listens and warms up; health is SERVING on return. Raises ConfigError where the address cannot be had or the
        model cannot answer."""
        self.frontend.start()
        if self.frontend.assets.vision is not None:
            self.pictures.start()
        server = grpc.aio.server(options=channel_options(self.options), interceptors=[self._door])
        self._set_health = add_standard_services(server, self._add_services(server))
        self.port = listen(server, self.options, self._credentials)
        if self.options.metrics_port is not None:
            self.metrics_port, end = self.metrics.serve(self.options.metrics_host, self.options.metrics_port)
            self._ends.callback(end)
        self._sweeper = asyncio.create_task(self._sweep())
        await server.start()
        self._server = server
        if self.options.warmup:
            try:
                await warm_up(self.frontend)
            except errors.StatusError as error:
                raise ConfigError(f"model: it could not answer the warm-up: {error.message}") from error
        self._warming = False
        self._set_health(not self._draining)
        if self.has_batches:
            self._batches().start()

    def _refusal(self) -> errors.StatusError | None:
        """Why no call is taken now, if none is."""
        if self._draining:
            return errors.draining()
        if self._warming:
            return errors.Unavailable("the server is warming up", reason="WARMING", retry_after=1.0)
        return None

    async def _sweep(self) -> None:
        """Uploads leave the disk soon after their time, also where nothing new arrives."""
        while True:
            await asyncio.sleep(min(60.0, self.options.media_ttl))
            await asyncio.to_thread(self.spool.sweep)
            await asyncio.to_thread(self._batch_store.sweep)

    def _add_services(self, server: grpc.aio.Server) -> list[str]:
        """Registers what clients speak to; returns the services' full names."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(self.calls), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self._model), server)
        media_pb2_grpc.add_MediaServiceServicer_to_server(MediaServicer(self.spool), server)
        names = ["Inference", "Model", "Media", "Admin"]
        if self.has_batches:
            batch_pb2_grpc.add_BatchServiceServicer_to_server(BatchServicer(self._batches()), server)
            names.append("Batch")
        admin = AdminServicer(
            self.frontend, self.spool, self.budget, drain=self._drain_asked, draining=lambda: self._draining
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        triton = KServeServicer(
            self.calls, self._model, self.budget, version=_version(),
            ready=lambda: self.frontend.engine.alive and self._refusal() is None,
        )  # fmt: skip
        server.add_generic_rpc_handlers((triton.handler(),))
        return [*(f"saccade.v1.{name}Service" for name in names), kserve.SERVICE]

    def _open_spool(self, limits: MediaLimits) -> Spool:
        options = self.options
        with self._folder("media_dir") as folder:
            return self._make_spool(
                folder, options.media_bytes, options.media_ttl, limits.file.frame,
                tenant_capacity=options.media_tenant_bytes, describe=self.pictures.describe,
            )  # fmt: skip

    def _open_spans(self) -> Spans | None:
        if self.options.otlp_endpoint is None:
            return None
        spans = Spans(self.options.otlp_endpoint, version=_version())
        self._ends.callback(spans.close)
        return spans

    def _make_spool(self, *arguments: Any, **keywords: Any) -> Spool:
        return Spool(*arguments, **keywords)

    def _drain_asked(self) -> None:
        """By an operator."""
        self.drain()

    def _open_batches(self) -> BatchStore:
        options = self.options
        if (options.batch_concurrency or 0) >= options.max_queue:
            raise ConfigError(
                f"batch_concurrency: {options.batch_concurrency} rows would leave live calls no place in a max_queue "
                f"of {options.max_queue}; at most {options.max_queue - 1} would work"
            )
        with self._folder("batch_dir") as folder:
            return BatchStore(
                folder, options.batch_bytes, options.batch_ttl, tenant_capacity=options.batch_tenant_bytes
            )

    @contextlib.contextmanager
    def _folder(self, option: str) -> Iterator[Path]:
        """The folder that an option names, else a temporary one. Trouble with it is a ConfigError."""
        folder = getattr(self.options, option)
        if folder is None:
            folder = self._ends.enter_context(
                tempfile.TemporaryDirectory(prefix=f"saccade-{option.partition('_')[0]}-")
            )
        try:
            yield Path(folder)
        except OSError as error:
            raise ConfigError(f"{option}: {folder}: {error.strerror}") from None
        except errors.StatusError as error:  # what is there cannot be looked at now
            raise ConfigError(f"{option}: {folder}: {error.message}") from error

    def _batches(self) -> Batches:
        """Made on the event loop."""
        if self.batches is None:
            options = self.options
            self.batches = Batches(
                self._batch_store,
                self.calls,
                model_from(self._model),
                BatchLimits(
                    options.batch_concurrency or min(16, max(1, options.max_queue // 2)),
                    options.batch_jobs,
                    options.batch_row_timeout,
                ),
                budget=self.budget,
                tenant=lambda name: self._guard.named(name, "batch"),
                folder=lambda tenant: Uploaded(self.spool, tenant),
            )
        return self.batches

    def _gauges(self) -> dict[str, float]:
        return {
            "live_requests": self.frontend.live,
            "inflight_bytes": self.budget.used,
            "media_bytes": self.spool.used_bytes,
            "batch_bytes": self._batch_store.used_bytes,
            "draining": float(self._draining),
        }

    def drain(self) -> None:
        """New generations are refused and health says so; running ones go on, those of batches excepted."""
        if not self._draining and self.batches is not None:
            self._draining_batches = asyncio.ensure_future(self.batches.stop())
        self._draining = True
        self._set_health(False)

    async def stop(self, grace: float | None = None) -> None:
        """Refuses new calls, lets running ones finish within `grace` seconds, then stops the engine. Idempotent; may be
        cancelled and called again with less grace."""
        self.drain()
        if self.batches is not None:
            await self.batches.stop()
        with contextlib.suppress(TimeoutError):
            # The port stays open meanwhile, so that new calls are told DRAINING; a closed one would only say CANCELLED.
            async with asyncio.timeout(self.options.grace if grace is None else grace):
                await self.frontend.idle.wait()
        if self.options.sizes_file is not None and self.frontend.engine.alive:
            try:
                sizes = await asyncio.wrap_future(self.frontend.engine.query("histogram"))
                await asyncio.to_thread(record_sizes, Path(self.options.sizes_file), sizes)
            except EngineDied as error:  # the rest has to stop all the same
                log.error("sizes_file: %s is not written: %s", self.options.sizes_file, error)
        if self._server is not None:
            await self._server.stop(grace=1.0 if self.frontend.idle.is_set() else 0)
            self._server = None
        await asyncio.get_running_loop().run_in_executor(None, self.frontend.close)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._ends.close)

    def engine_changed(self, alive: bool) -> None:
        """Health follows the engine; running calls are told by their own events. May be called from any thread."""
        self._set_health(alive and self._refusal() is None)

    def engine_given_up(self) -> None:
        """No engine is started any more: only a new process helps, and liveness says so. From any thread."""
        self._set_health(False, False)


def _say_what_is_off(info: EngineInfo) -> None:
    """Of the packages that a server can do without; health, reflection and metrics speak for themselves."""
    if not errors.has_details():
        log.warning("googleapis-common-protos is not installed: errors have no reason, field or time to wait")
    if info.takes_video and "MP4" not in video_formats():
        log.info("av is not installed: videos are GIF, APNG or WebP, not MP4 or WebM")


def _version() -> str:
    try:
        return importlib.metadata.version("saccade-server")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0"


def front_limits(options: ServerOptions) -> FrontLimits:
    image = ImageLimits(max_bytes=options.max_image_bytes, max_pixels=options.max_image_pixels)
    video = VideoLimits(
        options.max_video_bytes, options.max_video_file_frames, options.max_image_pixels, options.max_video_pixels
    )
    return FrontLimits(
        max_queue=options.max_queue, max_images=options.max_images_per_request,
        max_videos=options.max_videos_per_request, media=MediaLimits(image, video, options.max_video_frames),
        prepared_bytes=options.preprocess_bytes, max_answer_bytes=options.max_message_bytes,
    )  # fmt: skip


def byte_budget(options: ServerOptions) -> ByteBudget:
    """Half of it is the most that one tenant with a key may have, but always a message of the largest size."""
    return ByteBudget(options.max_inflight_bytes, max(options.max_inflight_bytes // 2, options.max_message_bytes))


def door_limits(options: ServerOptions, max_len: int = 0) -> DoorLimits:
    """`max_len`: tokens of the model's context, where messages may hold as many ids."""
    return DoorLimits(
        options.stall_timeout, options.receive_timeout, options.max_message_bytes, options.max_tenant_calls,
        max(max_len, MIN_IDS),
    )  # fmt: skip


def load_assets(options: ServerOptions) -> ModelAssets:
    checkpoint = open_checkpoint(options.model)
    return ModelAssets(checkpoint.config, resolve_vision(options, checkpoint))


def check_exposure(options: ServerOptions) -> None:
    """Plain text and strangers are for this machine only, unless somebody says otherwise."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(options.host, None)}
    except OSError:
        raise ConfigError(f"host: {options.host!r} is no address of this machine") from None
    exposed = [a for a in addresses if not ipaddress.ip_address(str(a).partition("%")[0]).is_loopback]
    missing = []
    if options.tls_cert is None:
        missing.append("plain text (no --tls-cert and --tls-key)")
    if options.api_keys is None and options.tls_client_ca is None:
        missing.append("with everybody (no --api-keys and no --tls-client-ca)")
    if exposed and missing and not options.insecure:
        raise ConfigError(
            f"host: {options.host} can be reached from other machines, and this server speaks {' and '.join(missing)}; "
            "give it those, or use 127.0.0.1 behind a proxy that has them, or say --insecure"
        )


def listen(server: Any, options: ServerOptions, credentials: Any) -> int:
    """Takes the address; returns the port. Raises ConfigError where it cannot be had."""
    address = f"[{options.host}]" if ":" in options.host else options.host
    where = f"{address}:{options.port}"
    try:
        if credentials is None:
            return int(server.add_insecure_port(where))
        return int(server.add_secure_port(where, credentials))
    except RuntimeError:
        raise ConfigError(f"port: cannot listen on {options.host}:{options.port}; is it taken?") from None


def channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    settings = [
        # Off, or a second server on the port would silently take half of the calls; fronts do share one, under a lock.
        ("grpc.so_reuseport", int(options.fronts > 1)),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        # Clients may ping a long silent generation every 10 s without being told to go away.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_concurrent_streams", options.max_connection_streams),
    ]
    # gRPC keeps its connections: without an age, clients never see the servers that were added after they connected.
    for name in ("max_connection_age", "max_connection_age_grace"):
        if (seconds := getattr(options, name)) is not None:
            settings.append((f"grpc.{name}_ms", round(seconds * 1000)))
    return settings


class SetHealth(Protocol):
    """Sets the health of the server and its services and, where it is said, of `LIVENESS`. From any thread."""

    def __call__(self, serving: bool, live: bool | None = None, /) -> None: ...


def add_standard_services(server: grpc.aio.Server, services: list[str]) -> SetHealth:
    """Health and reflection, where their packages are installed. Returns what sets health."""
    names, set_health = list(services), _add_health(server, services)
    if set_health is not None:
        names.append("grpc.health.v1.Health")
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError:
        log.warning("grpcio-reflection is not installed: no reflection service")
    else:
        names.append(reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=kserve.reflection_pool(names))
    return set_health or (lambda serving, live=None: None)


def _add_health(server: grpc.aio.Server, services: list[str]) -> SetHealth | None:
    """What sets health; None where the package is not installed. `LIVENESS` is SERVING from here on."""
    try:
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    except ImportError:
        log.warning("grpcio-health-checking is not installed: no health service")
        return None
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    loop = asyncio.get_running_loop()
    pending: set[asyncio.Task[None]] = set()

    words = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}

    def set_health(serving: bool, live: bool | None = None, /) -> None:
        async def apply() -> None:
            for name in ("", *services):
                await health_servicer.set(name, words[serving])
            if live is not None:
                await health_servicer.set(LIVENESS, words[live])

        def start() -> None:
            task = loop.create_task(apply())
            pending.add(task)
            task.add_done_callback(pending.discard)

        with contextlib.suppress(RuntimeError):  # the loop may be gone when the engine dies last
            loop.call_soon_threadsafe(start)

    set_health(False, True)
    return set_health


async def serve(options: ServerOptions) -> int:
    """Runs a server until SIGTERM or SIGINT. Prints the ready line once health is SERVING. Returns the exit code."""
    loop = asyncio.get_running_loop()
    stopping = stop_signals()
    servers: list[Server] = []

    def on_change(alive: bool) -> None:
        for server in servers:
            server.engine_changed(alive)

    def on_give_up() -> None:
        for server in servers:
            server.engine_given_up()

    def build() -> tuple[SupervisedEngine, ModelAssets]:
        assets = load_assets(options)
        engine = SupervisedEngine(options, log_level=options.log_level, on_change=on_change, on_give_up=on_give_up)
        return engine, assets

    check_exposure(options)
    engine, assets = await loop.run_in_executor(None, build)
    try:
        server = Server(options, engine, assets)
        servers.append(server)
        await server.start()
    except BaseException:
        engine.close()
        raise
    await until_stopped(server, stopping, options)
    return 0


class Stoppable(Protocol):
    """What listens on a port."""

    port: int

    async def stop(self, grace: float | None = None) -> None: ...


def stop_signals() -> asyncio.Event:
    """Set by SIGTERM and SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


async def until_stopped(server: Stoppable, stopping: asyncio.Event, options: ServerOptions) -> None:
    """Says that the server is ready, and stops it when it is told to."""
    print(f"saccade ready on {options.host}:{server.port}", flush=True)
    await stop_when_told(server, stopping, options.grace)


async def stop_when_told(server: Stoppable, stopping: asyncio.Event, grace: float) -> None:
    """With `grace` seconds for running calls, and when it is told so again at once."""
    await stopping.wait()
    log.info("stopping: running calls get %.0f s", grace)
    stopping.clear()
    stop, again = asyncio.create_task(server.stop(grace)), asyncio.create_task(stopping.wait())
    await asyncio.wait({stop, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not stop.done():
        log.warning("second signal: stopping now")
        stop.cancel()
        await asyncio.wait({stop})
        await server.stop(grace=0)
    else:
        await stop


def run(options: ServerOptions) -> int:
    """`saccade serve`: logging, event loop, server."""
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if options.role == "encoder":
        from service.encoder_server import serve_encoder

        return asyncio.run(serve_encoder(options))
    if options.fronts > 1:
        from service.fronts import serve_fronts

        return asyncio.run(serve_fronts(options))
    return asyncio.run(serve(options))
