"""`grpc.health.v1.Health`: the states of services, which clients ask for or watch.

The servicer of grpcio-health-checking is not used: when a client ends its Watch, those of others for the same service
are no longer told of changes, and a client that does not read its Watch delays every change of the service's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.common import errors
from service.rpc.statuses import abort

State = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Check and Watch. Used on one event loop."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced."""

    def set(self, serving: Mapping[str, bool]) -> None:
        """Sets the states of services by name."""
        self._serving |= serving
        self._changed.set()
        self._changed = asyncio.Event()

    def _state(self, name: str) -> int:
        serving = self._serving.get(name)
        if serving is None:
            return int(State.SERVICE_UNKNOWN)
        return int(State.SERVING if serving else State.NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        state = self._state(request.service)
        if state == State.SERVICE_UNKNOWN:
            await abort(context, errors.NotFound(f"no service {request.service!r}", field="service"))
        return State(status=state)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Sends the state now and after each change. A client that reads slowly misses states between two others."""
        told = None
        while True:
            changed = self._changed
            if (state := self._state(request.service)) != told:
                await context.write(State(status=state))
                told = state
            await changed.wait()
