"""AdminService: commands for operators. The interceptor checks who may call them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from saccade.v1 import admin_pb2, admin_pb2_grpc
from service.answers.frontend import Frontend
from service.common import errors
from service.common.limits import ByteBudget
from service.media.media import Spool

log = logging.getLogger(__name__)

LEVELS = ("debug", "info", "warning", "error")


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(
        self, frontend: Frontend, spool: Spool, budget: ByteBudget, *, drain: Callable[[], None],
        draining: Callable[[], bool], tell_log_level: Callable[[], None],
    ) -> None:  # fmt: skip
        """`tell_log_level`: called when the log level of this process has changed."""
        self._frontend, self._spool, self._budget = frontend, spool, budget
        self._drain, self._draining, self._tell_log_level = drain, draining, tell_log_level

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        log.warning("draining at an operator's request: %d requests are running", self._frontend.live)
        self._drain()
        return admin_pb2.DrainResponse(live_requests=self._frontend.live)

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Any) -> admin_pb2.FlushCacheResponse:
        answer = await asyncio.wrap_future(self._frontend.engine.query("flush"))
        return admin_pb2.FlushCacheResponse(freed_bytes=answer["freed_bytes"])

    async def GetLoads(self, request: admin_pb2.GetLoadsRequest, context: Any) -> admin_pb2.GetLoadsResponse:
        stats = await asyncio.wrap_future(self._frontend.engine.query("stats"))
        decoder, handoff = stats["decoder"], stats["handoff"]
        # In a thread, because with several frontends the files are counted on the disk.
        media_bytes = await asyncio.to_thread(lambda: self._spool.used_bytes)
        return admin_pb2.GetLoadsResponse(
            live_requests=self._frontend.live,
            running=decoder["running"],
            waiting=decoder["waiting"],
            free_blocks=decoder["free_blocks"],
            total_blocks=decoder["total_blocks"],
            handoff_used_bytes=handoff.get("used_bytes", 0),
            handoff_capacity_bytes=handoff.get("capacity_bytes", 0),
            inflight_bytes=self._budget.used,
            media_bytes=media_bytes,
            draining=self._draining(),
            max_running=self._frontend.engine.info.max_seqs,
            max_requests=self._frontend.limits.max_queue,
            handoff_cached_bytes=handoff.get("cached_bytes", 0),
            waiting_media=handoff.get("waiting", 0) + handoff.get("reserved", 0),
            encoding_media=handoff.get("writing", 0),
            prefix_cache_bytes=decoder["cache_bytes"],
            prefix_cache_checkpoints=decoder["cache_checkpoints"],
            prefix_cache_hit_tokens=decoder["cache_hit_tokens"],
            output_tokens=decoder["output_tokens"],
            encoder=_encoder_loads(stats["encoder"]),
        )

    async def UpdateLogLevel(
        self, request: admin_pb2.UpdateLogLevelRequest, context: Any
    ) -> admin_pb2.UpdateLogLevelResponse:
        if request.level not in LEVELS:
            raise errors.InvalidArgument(
                f"level is {request.level!r}; it must be one of {', '.join(LEVELS)}", field="level"
            )
        root = logging.getLogger()
        previous = logging.getLevelName(root.level).lower()
        root.setLevel(request.level.upper())
        self._tell_log_level()
        return admin_pb2.UpdateLogLevelResponse(previous_level=previous)


def _encoder_loads(stats: dict[str, Any]) -> admin_pb2.EncoderLoads | None:
    """The encoder's counters; None unless the encoder runs in the engine's process."""
    if "budgets" not in stats:
        return None
    sizes = stats["budgets"]
    return admin_pb2.EncoderLoads(
        budgets=[
            admin_pb2.EncoderBudget(
                tokens=tokens, graph=tokens in sizes["graphs"], replays=stats.get(f"replays_{tokens}", 0)
            )
            for tokens in sizes["tokens"]
        ],
        max_images=sizes["max_images"],
        images=stats["images"],
        temporal_patches=stats["temporal_patches"],
        real_tokens=stats["real_tokens"],
        padded_tokens=stats["padded_tokens"],
        eager_launches=sum(count for name, count in stats.items() if name.startswith("eager_")),
    )
