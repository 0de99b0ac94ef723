"""Prometheus metrics: what the frontend counts, and the engine's counters at each scrape. Without prometheus-client,
which is needed only for scraping, nothing is counted.

Metric names are stable; docs/operations.md lists them. Each server has a registry of its own, so that several can run
in a process.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import accumulate
from typing import Any, cast

from service.common.config import ConfigError

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.utils import floatToGoString
except ModuleNotFoundError as error:
    if not str(error.name).startswith("prometheus_client"):
        raise
    INSTALLED = False
else:
    INSTALLED = True

log = logging.getLogger(__name__)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
SCRAPE_TIMEOUT = 2.0


class Metrics:
    """The counters and histograms of a frontend."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter("saccade_calls", "gRPC calls that have ended", ["method", "code"], registry=self.registry)
        self._generations = Counter(
            "saccade_generations", "generations that have ended", ["code"], registry=self.registry
        )
        self._tokens = Counter(
            "saccade_tokens",
            "tokens: prompt (including image, video and cached ones), image, video, cached, generated",
            ["kind"],
            registry=self.registry,
        )
        self._first = Histogram(
            "saccade_time_to_first_token_seconds", "from arrival to the first token", buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._queue = Histogram(
            "saccade_queue_seconds", "from arrival to the first step: preparation of images and text, and waiting",
            buckets=SECONDS, registry=self.registry,
        )  # fmt: skip
        self._gap = _Gaps("saccade_inter_token_seconds", "between two tokens of a sample")
        self.registry.register(self._gap)  # type: ignore[arg-type]
        self._seconds = Histogram(
            "saccade_generation_seconds", "whole generations that succeeded", buckets=SECONDS, registry=self.registry
        )
        self._request_bytes = Counter("saccade_request_bytes", "bytes of request messages", registry=self.registry)

    def call(self, method: str, code: str, request_bytes: int) -> None:
        self._calls.labels(method, code).inc()
        self._request_bytes.inc(request_bytes)

    def token_gap(self, seconds: float, tokens: int) -> None:
        """Records `tokens` that came `seconds` after the one before them."""
        self._gap.observe(seconds / tokens, tokens)

    def generation(
        self, code: str, *, prompt: int, image: int, video: int, cached: int, generated: int, queue: float | None,
        first_token: float | None, seconds: float,
    ) -> None:  # fmt: skip
        self._generations.labels(code).inc()
        counts = {"prompt": prompt, "image": image, "video": video, "cached": cached, "generated": generated}
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)
        if queue is not None:
            self._queue.observe(queue)
        if first_token is not None:
            self._first.observe(first_token)
        if code == "OK":
            self._seconds.observe(seconds)

    def watch_engine(
        self, query: Callable[[], Future[dict[str, Any]]], gauges: Callable[[], dict[str, float]],
        parts: Callable[[], dict[str, dict[str, float]]] = dict,
    ) -> None:  # fmt: skip
        """Adds the engine's counters, asked for at each scrape, the frontend's gauges, and counters of its parts,
        named as the engine's."""
        self.registry.register(_EngineCollector(query, gauges, parts))  # type: ignore[arg-type]

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Starts the HTTP endpoint; returns its port and a function that stops it. Raises ConfigError where the port is
        taken."""
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {error.strerror}") from None

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return int(server.server_port), stop


class _Gaps:
    """A histogram that counts several equal observations at once: prometheus-client's takes 3 us for each, a quarter of
    what the frontend spends on a token. Written by one thread."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name, self._documentation = name, documentation
        self._counts = [0] * (len(GAPS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int) -> None:
        self._counts[bisect_left(GAPS, seconds)] += count
        self._sum += seconds * count

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, GAPS), "+Inf"]
        totals = accumulate(self._counts)
        yield HistogramMetricFamily(
            self._name, self._documentation, buckets=list(zip(bounds, totals, strict=True)), sum_value=self._sum
        )


class _EngineCollector:
    """Converts the engine's nested counters to metrics, whatever their names are."""

    def __init__(
        self, query: Callable[[], Future[dict[str, Any]]], gauges: Callable[[], dict[str, float]],
        parts: Callable[[], dict[str, dict[str, float]]],
    ) -> None:  # fmt: skip
        self._query, self._gauges, self._parts = query, gauges, parts

    def describe(self) -> list[Metric]:
        return []  # an empty answer: the registry would otherwise query the engine while the server is being built

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("saccade_engine_up", "whether the engine answers")
        try:
            stats: dict[str, Any] = self._query().result(SCRAPE_TIMEOUT)
        except Exception as error:  # there is no engine, or it is in the middle of a long step
            log.debug("no engine statistics: %r", error)
            stats = {}
        up.add_metric([], float(bool(stats)))
        yield up
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"saccade_{name}", f"the frontend's {name.replace('_', ' ')}", value=value)
        yield from engine_metrics({**stats, **self._parts()})


# The engine's gauges; all other counters only grow.
_GAUGES = re.compile(
    r"live|running|waiting|leases|cached|reserved|writing|ready|quarantined|unused_graphs|cache_checkpoints|\w+_(bytes|blocks|items|slots|pages|now)"
)
_GRAPH_COUNTER = re.compile(r"(replays|eager|waited)_(\w+)|(drafted|accepted)_(\d+)")
_LABELS = {"replays": "budget", "eager": "reason", "waited": "reason", "drafted": "position", "accepted": "position"}


def engine_metrics(stats: dict[str, Any]) -> Iterator[Metric]:
    """`{"decoder": {"steps": 3}, ...}` -> saccade_decoder_steps_total 3. Counters that differ only in a budget or a
    reason (`replays_256`, `eager_larger`) become one with a label."""
    flat = {"engine": {k: v for k, v in stats.items() if not isinstance(v, dict)}}
    flat |= {part: values for part, values in stats.items() if isinstance(values, dict)}
    for part, values in flat.items():
        grouped: dict[str, dict[str, float]] = {}
        yield from _encoder_metrics(values.get("encoders", {}))
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if (match := _GRAPH_COUNTER.fullmatch(name)) is not None:
                grouped.setdefault(match[1] or match[3], {})[match[2] or match[4]] = value
            elif _GAUGES.fullmatch(name):
                yield GaugeMetricFamily(f"saccade_{part}_{name}", f"{part}: {name.replace('_', ' ')}", value=value)
            else:
                yield CounterMetricFamily(f"saccade_{part}_{name}", f"{part}: {name.replace('_', ' ')}", value=value)
        for name, by_label in grouped.items():
            label = _LABELS[name]
            family = CounterMetricFamily(f"saccade_{part}_{name}", f"{part}: {name} by {label}", labels=[label])
            for key, value in by_label.items():
                family.add_metric([key], value)
            yield family


def _encoder_metrics(encoders: dict[str, dict[str, float]]) -> Iterator[Metric]:
    """The counters of each encoder in another process or on another host, labelled by its address."""
    for name in next(iter(encoders.values()), {}):
        kind = GaugeMetricFamily if _GAUGES.fullmatch(name) else CounterMetricFamily
        words = name.removesuffix("_now").removesuffix("_total")
        family = kind(f"saccade_encoders_{words}", f"each encoder's {words.replace('_', ' ')}", labels=["encoder"])
        for encoder, values in encoders.items():
            family.add_metric([encoder], values[name])
        yield family


class _NoMetrics:
    """Has every method of `Metrics` and counts nothing."""

    def call(self, method: str, code: str, request_bytes: int) -> None:
        """Does nothing."""

    def token_gap(self, seconds: float, tokens: int) -> None:
        """Does nothing."""

    def generation(self, code: str, **numbers: Any) -> None:
        """Does nothing."""

    def watch_engine(self, *queries: Callable[[], Any]) -> None:
        """Does nothing."""

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Raises ConfigError: metrics were asked for and prometheus-client is not installed."""
        raise ConfigError(f"metrics_port {port} needs prometheus-client, which is not installed")


def make_metrics() -> Metrics:
    """The metrics of a server; logs a warning if they count nothing."""
    if not INSTALLED:
        log.warning("prometheus-client is not installed: no metrics")
        return cast("Metrics", _NoMetrics())
    return Metrics()
