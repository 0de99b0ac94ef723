"""AdminService: an operator's commands. The interceptor checks who may use them."""

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
        draining: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._frontend, self._spool, self._budget = frontend, spool, budget
        self._drain, self._draining = drain, draining

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        log.warning("draining, as an operator asked: %d requests are running", self._frontend.live)
        self._drain()
        return admin_pb2.DrainResponse(live_requests=self._frontend.live)

    async def FlushCache(self, request: admin_pb2.FlushCacheRequest, context: Any) -> admin_pb2.FlushCacheResponse:
        answer = await asyncio.wrap_future(self._frontend.engine.query("flush"))
        return admin_pb2.FlushCacheResponse(freed_bytes=answer["freed_bytes"])

    async def GetLoads(self, request: admin_pb2.GetLoadsRequest, context: Any) -> admin_pb2.GetLoadsResponse:
        stats = await asyncio.wrap_future(self._frontend.engine.query("stats"))
        decoder, handoff = stats["decoder"], stats["handoff"]
        return admin_pb2.GetLoadsResponse(
            live_requests=self._frontend.live,
            running=decoder["running"],
            waiting=decoder["waiting"],
            free_blocks=decoder["free_blocks"],
            total_blocks=decoder["total_blocks"],
            handoff_used_bytes=handoff.get("used_bytes", 0),
            handoff_capacity_bytes=handoff.get("capacity_bytes", 0),
            inflight_bytes=self._budget.used,
            media_bytes=self._spool.used_bytes,
            draining=self._draining(),
        )

    async def UpdateLogLevel(
        self, request: admin_pb2.UpdateLogLevelRequest, context: Any
    ) -> admin_pb2.UpdateLogLevelResponse:
        if request.level not in LEVELS:
            raise errors.InvalidArgument(f"level is {request.level!r}; it can be {', '.join(LEVELS)}", field="level")
        root = logging.getLogger()
        previous = logging.getLevelName(root.level).lower()
        root.setLevel(request.level.upper())
        return admin_pb2.UpdateLogLevelResponse(previous_level=previous)
