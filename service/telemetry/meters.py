"""Metrics where prometheus-client is installed, and nothing where it is not: a server needs it for scrapes only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from service.common.config import ConfigError

if TYPE_CHECKING:
    from service.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


class NoMetrics:
    """Counts nothing. Every method of `service.telemetry.metrics.Metrics` is here."""

    def call(self, method: str, code: str, request_bytes: int) -> None:
        """Nothing."""

    def token_gap(self, seconds: float, tokens: int) -> None:
        """Nothing."""

    def generation(self, code: str, **numbers: Any) -> None:
        """Nothing."""

    def watch_engine(self, *queries: Callable[[], Any]) -> None:
        """Nothing."""

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Raises ConfigError: somebody asked for what is not there."""
        raise ConfigError(f"metrics_port {port} needs prometheus-client, which is not installed")


def make_metrics() -> Metrics:
    """What a server counts with; says once when that is nothing."""
    try:
        from service.telemetry.metrics import Metrics
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("prometheus_client"):
            raise
        log.warning("prometheus-client is not installed: no metrics")
        return cast("Metrics", NoMetrics())
    return Metrics()
