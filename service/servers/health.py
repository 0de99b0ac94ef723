"""Health and reflection services."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

import grpc

from service.rpc.kserve_messages import reflection_pool

log = logging.getLogger(__name__)


LIVENESS = "liveness"
"""Name in the health service for liveness probes. SERVING, also during drains, warm-ups and restarts of the engine,
until the server stops trying to start an engine and only a new server process would help."""


class SetHealth(Protocol):
    """Sets the health of the server and its services and, if given, that of `LIVENESS`. Callable from any thread."""

    def __call__(self, serving: bool, live: bool | None = None, /) -> None: ...


def add_standard_services(server: grpc.aio.Server, services: list[str]) -> SetHealth:
    """Adds health and reflection, if their packages are installed. Returns a function that sets health."""
    names, set_health = list(services), _add_health(server, services)
    if set_health is not None:
        names.append("grpc.health.v1.Health")
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError:
        log.warning("grpcio-reflection is not installed: no reflection service")
    else:
        names.append(reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=reflection_pool(names))
    return set_health or (lambda serving, live=None: None)


def _add_health(server: grpc.aio.Server, services: list[str]) -> SetHealth | None:
    """A function that sets health; None if the package is not installed. `LIVENESS` is SERVING from here on."""
    try:
        from grpc_health.v1 import health_pb2_grpc
    except ImportError:
        log.warning("grpcio-health-checking is not installed: no health service")
        return None
    from service.rpc.health import HealthServicer  # imported here: it needs the package

    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    loop = asyncio.get_running_loop()

    def set_health(serving: bool, live: bool | None = None, /) -> None:
        states = dict.fromkeys(("", *services), serving)
        if live is not None:
            states[LIVENESS] = live
        with contextlib.suppress(RuntimeError):  # the loop may be closed when the engine dies last
            loop.call_soon_threadsafe(servicer.set, states)

    set_health(False, True)
    return set_health
