"""The gRPC server: options, services, health, start and stop.

When the server stops, health becomes NOT_SERVING, new calls are rejected, running calls get their grace period, and
then the engine stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
from collections.abc import Callable
from pathlib import Path

import grpc

from encoder.media_limits import video_formats
from saccade._core.results import model_from
from saccade.v1 import (
    admin_pb2_grpc,
    batch_pb2_grpc,
    inference_pb2_grpc,
    media_pb2_grpc,
    model_pb2_grpc,
)
from service.answers import convert
from service.answers.calls import Calls
from service.answers.door import Door
from service.answers.frontend import Frontend
from service.answers.warmup import warm_up
from service.batches.batch_runs import Uploaded
from service.batches.batches import Batches, BatchLimits
from service.common import errors
from service.common.auth import Guard, watch_keys
from service.common.config import ConfigError, ServerOptions
from service.common.errors import EngineDied
from service.common.limits import Places
from service.engine.types import EngineHandle, EngineInfo
from service.media.fetch import make_fetcher
from service.media.image_pool import ImagePool
from service.model.assets import ModelAssets
from service.rpc.admin import AdminServicer
from service.rpc.batch_servicer import BatchServicer
from service.rpc.http_requests import HttpRequests
from service.rpc.interceptor import DoorInterceptor
from service.rpc.kserve import KServeServicer
from service.rpc.kserve_messages import SERVICE
from service.rpc.servicer import InferenceServicer, MediaServicer, ModelServicer, media_resolver
from service.rpc.statuses import has_details
from service.servers.credentials import server_credentials
from service.servers.exposure import channel_options, check_exposure, listen
from service.servers.from_options import byte_budget, door_limits, frontend_limits, make_image_pool
from service.servers.health import SetHealth, add_standard_services
from service.servers.preflight import gateway
from service.servers.stores import open_batch_store, open_spool
from service.telemetry.access_log import AccessLog
from service.telemetry.call_context import current_call
from service.telemetry.metrics import make_metrics
from service.telemetry.sizes import SizesFile, check_sizes_file
from service.telemetry.tracing import Spans

log = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0
"""Largest time between two deletions of expired uploads and batches."""
SIZES_SECONDS = 5.0
"""Seconds that a server that stops waits for the sizes of images from its engine, which may hang."""


class Server:
    """A gRPC server with one engine. Call `start`, then `stop`."""

    has_batches = True

    def __init__(
        self, options: ServerOptions, engine: EngineHandle, assets: ModelAssets, *,
        image_pool: ImagePool | None = None, member: int | None = None,
    ) -> None:  # fmt: skip
        """`image_pool`: prepares images and videos; by default `make_image_pool`'s. It is closed with this object.
        `member`: the number of this frontend process if there are several."""
        check_exposure(options)
        check_sizes_file(options)
        self.options = options
        self._sizes = None if options.sizes_file is None else SizesFile(Path(options.sizes_file))
        limits = frontend_limits(options)
        self.image_pool = image_pool or make_image_pool(options, assets)
        self.frontend = Frontend(engine, assets, limits, workers=options.image_workers, processor=self.image_pool)
        self._model = convert.model_to_proto(engine.info, assets, limits, options)
        fetcher = make_fetcher(options, limits.media)
        self._credentials = server_credentials(options)
        self._guard = Guard(
            watch_keys(options.api_keys, options.frontends) if options.api_keys else None, admin=options.admin
        )
        self.metrics, self.budget = make_metrics(), byte_budget(options)
        self.metrics.watch_engine(
            lambda: engine.query("stats"), self._gauges, lambda: {"preprocess": self.frontend.stats()}
        )
        _log_missing_packages(engine.info)
        access = AccessLog(as_json=options.log_json)
        with contextlib.ExitStack() as self._ends:  # closes what has been opened if this constructor fails
            spans = None
            if options.otlp_endpoint is not None:
                spans = Spans(options.otlp_endpoint, version=_version())
                self._ends.callback(spans.close)
            self.calls = Calls(
                self.frontend, default_timeout=options.default_timeout, closed=self._refusal,
                metrics=self.metrics, access=access, spans=spans,
                places=Places(options.max_tenant_requests or max(1, options.max_queue // 2), "requests"),
            )  # fmt: skip
            self._door = Door(self._guard, self.budget, self.metrics, access, door_limits(options, engine.info.max_len))
            self.spool = self._ends.enter_context(
                open_spool(options, limits.media.file.max_bytes, self.image_pool.describe, member)
            )
            self.frontend.resolve = media_resolver(self.spool, fetcher)
            self._batch_store = self._ends.enter_context(open_batch_store(options))
            self._ends = self._ends.pop_all()
        self.batches: Batches | None = None
        self._batches_end: asyncio.Future[None] | None = None
        self._draining = False
        self._warming = True
        self.http_requests = HttpRequests(lambda: errors.draining() if self._draining else None)
        self._server: grpc.aio.Server | None = None
        self._server_end: asyncio.Future[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._set_health: SetHealth = lambda serving, live=None: None
        self.port = 0
        self.metrics_port = 0
        self.private_socket: str | None = None
        """Path of a Unix socket, without TLS, through which this server's HTTP server connects; None: there is none."""
        self.tell_log_level: Callable[[], None] = lambda: None
        """Called when the log level of this process has changed, to tell other processes. The engine's processes need
        no such call."""

    async def start(self) -> None:
        """Starts to listen and warms up; health is SERVING on return. Raises ConfigError if the address cannot be bound
        or the model cannot answer."""
        self.frontend.start()
        self.image_pool.start()
        server = grpc.aio.server(options=channel_options(self.options), interceptors=[DoorInterceptor(self._door)])
        self._set_health = add_standard_services(server, self._add_services(server))
        self.port = listen(server, self.options, self._credentials)
        if self.private_socket is not None:
            server.add_insecure_port(f"unix:{self.private_socket}")
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
                raise ConfigError(f"model: the warm-up request failed: {error.message}") from error
        self._warming = False
        self.engine_changed(self.frontend.engine.alive)  # it may have ended since it was built
        if self.has_batches:
            self._batches().start()

    def _refusal(self) -> errors.StatusError | None:
        """The error for new calls if they are not accepted now; None if they are."""
        if self._draining and not current_call().accepted:
            return errors.draining()
        if self._warming:
            return errors.Unavailable("the server is warming up", reason="WARMING", retry_after=1.0)
        return None

    async def _sweep(self) -> None:
        """Deletes expired uploads and batches periodically, even if no new ones arrive."""
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self.options.media_ttl))
            for what, sweep in (("uploads", self.spool.sweep), ("batches", self._batch_store.sweep)):
                try:
                    await asyncio.to_thread(sweep)
                except OSError as error:  # the next time may succeed
                    log.error("expired %s cannot be deleted: %s", what, error)

    def _add_services(self, server: grpc.aio.Server) -> list[str]:
        """Adds the services; returns their full names."""

        def ready() -> bool:
            return self.frontend.engine.alive and self._refusal() is None

        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(self.calls), server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(self._model, self.frontend.assets), server)
        media_pb2_grpc.add_MediaServiceServicer_to_server(MediaServicer(self.spool), server)
        names = ["Inference", "Model", "Media", "Admin"]
        if self.has_batches:
            batch_pb2_grpc.add_BatchServiceServicer_to_server(BatchServicer(self._batches()), server)
            names.append("Batch")
        admin = AdminServicer(
            self.frontend, self.spool, self.budget, drain=self._drain_asked, draining=lambda: self._draining,
            tell_log_level=self.tell_log_level,
        )  # fmt: skip
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        triton = KServeServicer(self.calls, self._model, self.budget, version=_version(), ready=ready)
        server.add_generic_rpc_handlers((triton.handler(),))
        server.add_generic_rpc_handlers((self.http_requests.handler(),))
        others = [SERVICE]
        if self.options.vllm_engine:
            others.append(self._add_gateway_service(server, ready))
        return [*(f"saccade.v1.{name}Service" for name in names), *others]

    def _add_gateway_service(self, server: grpc.aio.Server, ready: Callable[[], bool]) -> str:
        vllm_engine = gateway()
        servicer = vllm_engine.VllmEngineServicer(
            self.calls, self._model, self.frontend.assets, version=_version(),
            max_seqs=self.frontend.engine.info.max_seqs, ready=ready,
        )  # fmt: skip
        server.add_generic_rpc_handlers((servicer.handler(),))
        return str(vllm_engine.SERVICE)

    def _drain_asked(self) -> None:
        """Drains the server at an operator's request."""
        self.drain()

    def _batches(self) -> Batches:
        """The batches, which are created by the first call; it must be made on the event loop."""
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
                    options.media_ttl,
                ),
                budget=self.budget,
                tenant=lambda name: self._guard.named(name, "batch"),
                folder=lambda tenant: Uploaded(self.spool, tenant),
            )
        return self.batches

    def _gauges(self) -> dict[str, float]:
        return {
            "live_requests": self.frontend.live,
            "oldest_wait_seconds": self.frontend.oldest_wait(),
            "inflight_bytes": self.budget.used,
            "media_bytes": self.spool.used_bytes,
            "batch_bytes": self._batch_store.used_bytes,
            "draining": float(self._draining),
        }

    def drain(self) -> None:
        """Rejects new generations and sets health to NOT_SERVING. Running ones continue, except those of batches."""
        if not self._draining and self.batches is not None:
            self._batches_end = asyncio.ensure_future(self.batches.stop())
        self._draining = True
        self._set_health(False)

    async def stop(self, grace: float | None = None) -> None:
        """Rejects new calls, lets running ones finish within `grace` seconds, then stops the engine. Idempotent; may be
        cancelled and called again with less grace."""
        self.drain()
        with contextlib.suppress(TimeoutError):
            # The port stays open meanwhile, so that new calls fail with DRAINING instead of CANCELLED.
            async with asyncio.timeout(self.options.grace if grace is None else grace):
                await self._until_batches_end()
                await self.http_requests.idle.wait()
                await self.frontend.idle.wait()
        if self._sizes is not None and self.frontend.engine.alive:
            try:
                async with asyncio.timeout(SIZES_SECONDS):
                    sizes = await asyncio.wrap_future(self.frontend.engine.query("histogram"))
                await self._sizes.record(sizes)
            except (EngineDied, TimeoutError) as error:  # everything else has to be stopped anyway
                why = str(error) or f"the engine has not answered within {SIZES_SECONDS:g} s"
                log.error("sizes_file: %s is not written: %s", self.options.sizes_file, why)
        if self._server is not None:
            # Once and to its end: gRPC may hang if its stop is cancelled and called again.
            idle = self.http_requests.idle.is_set() and self.frontend.idle.is_set()
            self._server_end = asyncio.ensure_future(self._server.stop(grace=1.0 if idle else 0))
            self._server = None
        if self._server_end is not None:
            await asyncio.shield(self._server_end)
        await asyncio.get_running_loop().run_in_executor(None, self.frontend.close)
        await self._until_batches_end()  # without image workers, no row waits for one any more
        if self._sweeper is not None:
            self._sweeper.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._ends.close)

    async def _until_batches_end(self) -> None:
        """Waits for the end of the batches that `drain` has stopped. A row ends when an image worker has read its file,
        which may take minutes for a video. May be cancelled, without effect on the batches."""
        if self._batches_end is not None:
            await asyncio.wait({self._batches_end})

    def engine_changed(self, alive: bool) -> None:
        """Sets health according to the engine's state; running calls get events of their own. Can be called from any
        thread."""
        self._set_health(alive and self._refusal() is None)

    def engine_given_up(self) -> None:
        """To be called when no further engine will be started. Only a new server process helps then, so liveness is set
        to NOT_SERVING. Can be called from any thread."""
        self._set_health(False, False)


def _log_missing_packages(info: EngineInfo) -> None:
    """Logs which optional packages are missing, except those of health, reflection and metrics, which log that
    themselves."""
    if not has_details():
        log.warning("googleapis-common-protos is not installed: errors have no reason, field or retry delay")
    if info.takes_video and "MP4" not in video_formats():
        log.info("av is not installed: videos can be %s, but not MP4 or WebM", ", ".join(video_formats()))


def _version() -> str:
    try:
        return importlib.metadata.version("saccade-server")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "0"
