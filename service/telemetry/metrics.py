"""Prometheus metrics: what the frontend counts, and the engine's counters, which are read at each scrape. Nothing is
counted if prometheus-client is not installed, since only scraping needs it.

Names, types and help texts are in metric_names.py. Each server has a registry of its own, so that several can run in
one process.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import accumulate
from typing import Any, cast

from service.common.config import ConfigError
from service.common.option import cannot_listen
from service.telemetry.metric_names import COUNTER, GAUGE, METRICS, Declared, find

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
        UnknownMetricFamily,
    )  # fmt: skip
    from prometheus_client.utils import floatToGoString

    from service.telemetry.metrics_port import MetricsServer
except ModuleNotFoundError as error:
    if not str(error.name).startswith("prometheus_client"):
        raise
    INSTALLED = False
else:
    INSTALLED = True

log = logging.getLogger(__name__)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper bounds of the histograms' buckets, in seconds."""
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
"""The same for the time between two tokens."""
SCRAPE_TIMEOUT = 2.0
"""Seconds that a scrape waits for the engine, which may be in a long step; then its metrics are left out."""


class Metrics:
    """The counters and histograms of a frontend."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls, self._generations = self._counter("calls"), self._counter("generations")
        self._tokens, self._request_bytes = self._counter("tokens"), self._counter("request_bytes")
        self._first, self._queue = self._histogram("time_to_first_token_seconds"), self._histogram("queue_seconds")
        self._gap = _Gaps("inter_token_seconds")
        self.registry.register(self._gap)  # type: ignore[arg-type]
        self._seconds = self._histogram("generation_seconds")

    def _counter(self, name: str) -> Counter:
        declared = METRICS[name]
        return Counter(f"saccade_{name}", declared.documentation, declared.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        return Histogram(f"saccade_{name}", METRICS[name].documentation, buckets=SECONDS, registry=self.registry)

    def call(self, method: str, code: str, request_bytes: int) -> None:
        self._calls.labels(method, code).inc()
        self._request_bytes.inc(request_bytes)

    def token_gap(self, seconds: float, tokens: int) -> None:
        """Records `tokens` that came `seconds` after the one before them."""
        self._gap.observe(seconds / tokens, tokens)

    def tokens(self, **counts: int) -> None:
        """Counts tokens by kind."""
        for kind, count in counts.items():
            self._tokens.labels(kind).inc(count)

    def generation(
        self, code: str, *, prompt: int, image: int, video: int, cached: int, generated: int, queue: float | None,
        first_token: float | None, seconds: float,
    ) -> None:  # fmt: skip
        self._generations.labels(code).inc()
        self.tokens(prompt=prompt, image=image, video=video, cached=cached, generated=generated)
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
        """Adds three sources that are read at each scrape. `query`: the engine's counters. `gauges`: the frontend's
        gauges by name. `parts`: counters of parts of the frontend, structured like the engine's."""
        self.registry.register(_EngineCollector(query, gauges, parts))  # type: ignore[arg-type]

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Starts the HTTP endpoint; returns its port and a function that stops it. Raises ConfigError if it cannot
        listen."""
        try:
            server = MetricsServer(host, port, self.registry)
        except OSError as error:
            raise cannot_listen("metrics_host", "metrics_port", host, port, error) from None

        thread = threading.Thread(target=server.serve_forever, name="saccade-metrics", daemon=True)
        thread.start()
        log.info("metrics are served on port %d", server.server_port)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return int(server.server_port), stop


class _Gaps:
    """A histogram that counts several equal observations at once. prometheus-client's histogram takes 3 us for each, a
    quarter of the time that the frontend spends on a token. Written by one thread."""

    def __init__(self, name: str) -> None:
        self._name, self._documentation = f"saccade_{name}", METRICS[name].documentation
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
    """Asks the engine for its counters at each scrape."""

    def __init__(
        self, query: Callable[[], Future[dict[str, Any]]], gauges: Callable[[], dict[str, float]],
        parts: Callable[[], dict[str, dict[str, float]]],
    ) -> None:  # fmt: skip
        self._query, self._gauges, self._parts = query, gauges, parts

    def describe(self) -> list[Metric]:
        return []  # without this method, the registry would query the engine while the server is being built

    def collect(self) -> Iterator[Metric]:
        try:
            stats: dict[str, Any] = self._query().result(SCRAPE_TIMEOUT)
        except Exception as error:  # there is no engine, or it is busy with a long step
            log.debug("no engine statistics: %r", error)
            stats = {}
        for name, value in {"engine_up": float(bool(stats)), **self._gauges()}.items():
            yield from _families({name: {"": value}})
        yield from engine_metrics({**stats, **self._parts()})


def engine_metrics(stats: dict[str, Any]) -> Iterator[Metric]:
    """`{"decoder": {"steps": 3}, ...}` -> saccade_decoder_steps_total 3. Counters that differ only in the value of a
    label (`replays_256`, `eager_larger`) become one metric."""
    parts = {"engine": {k: v for k, v in stats.items() if not isinstance(v, dict)}}
    parts |= {part: values for part, values in stats.items() if isinstance(values, dict)}
    found: dict[str, dict[str, float]] = {}
    for part, values in parts.items():
        for counter, value in values.items():
            if not isinstance(value, bool) and isinstance(value, int | float):
                declared, label = find(part, counter) or (None, "")
                found.setdefault(declared.name if declared else f"{part}_{counter}", {})[label] = value
        for encoder, counters in values.get("encoders", {}).items():
            for counter, value in counters.items():
                name = counter.removesuffix("_now").removesuffix("_total")
                found.setdefault(f"encoders_{name}", {})[encoder] = value
    yield from _families(found)


def _families(found: dict[str, dict[str, float]]) -> Iterator[Metric]:
    """Converts metrics for the exporter. `found`: name -> value of the label ("" without a label) -> value. A metric
    that is not declared is exported without a type."""
    for name, values in found.items():
        declared = METRICS.get(name, Declared(name, "", "", "not in service/telemetry/metric_names.py"))
        kind = {COUNTER: CounterMetricFamily, GAUGE: GaugeMetricFamily}.get(declared.kind, UnknownMetricFamily)
        family = kind(f"saccade_{name}", declared.documentation, labels=declared.labels)
        for label, value in values.items():
            family.add_metric([label] if declared.labels else [], value)
        yield family


class _NoMetrics:
    """Has every method of `Metrics` and counts nothing."""

    def call(self, method: str, code: str, request_bytes: int) -> None:
        """Does nothing."""

    def token_gap(self, seconds: float, tokens: int) -> None:
        """Does nothing."""

    def tokens(self, **counts: int) -> None:
        """Does nothing."""

    def generation(self, code: str, **numbers: Any) -> None:
        """Does nothing."""

    def watch_engine(self, *queries: Callable[[], Any]) -> None:
        """Does nothing."""

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Raises ConfigError, because prometheus-client is not installed."""
        check_installed(port)
        raise AssertionError("not reached: this class is used only without prometheus-client")


def check_installed(port: int) -> None:
    """Raises ConfigError if prometheus-client is not installed. `port`: where metrics were asked for."""
    if not INSTALLED:
        raise ConfigError(
            f"metrics_port: {port} needs prometheus-client, which is not installed: pip install prometheus-client"
        )


def make_metrics() -> Metrics:
    """The metrics of a server; logs a warning if they count nothing."""
    if not INSTALLED:
        log.warning("prometheus-client is not installed: no metrics")
        return cast("Metrics", _NoMetrics())
    return Metrics()
