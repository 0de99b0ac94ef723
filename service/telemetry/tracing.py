"""Reads W3C trace context from a call's metadata, and optionally sends OpenTelemetry spans of each generation by OTLP
over gRPC: `--otlp-endpoint HOST:PORT`.

    saccade.generate     from arrival to the end, a child of the caller's span if the metadata names one
      saccade.prepare    text to ids, images to patches, submission to the engine
      saccade.first      waiting for the encoder and for a batch slot, prefill, up to the first token
      saccade.decode     from the first token to the last

Spans are written when a generation has ended, from times that are measured anyway, so they cost a running request
nothing. They contain no prompts, answers or keys.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.common.config import ConfigError
from service.common.option import check_addresses

INSTALL = (
    "otlp_endpoint: spans need OpenTelemetry, which is not installed: "
    "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"
)
_NANO = 1_000_000_000
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True)
class TraceContext:
    """The caller's span: trace id and span id, 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool


def from_metadata(metadata: Mapping[str, str | bytes]) -> TraceContext | None:
    """Parses a `traceparent` header; None if there is none, or one that the standard says to ignore."""
    value = metadata.get("traceparent")
    match = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace, 16) or not int(span, 16):
        return None
    return TraceContext(trace, span, bool(int(flags, 16) & 1))


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError for an endpoint that is not HOST:PORT, optionally after http:// or https://, and if packages
    are missing."""
    address = endpoint.removeprefix("https://").removeprefix("http://").rstrip("/")
    check_addresses("otlp_endpoint", (address,))
    for package in ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(INSTALL) from error


class Spans:
    """Sends spans in the background. `close` sends the remaining ones."""

    def __init__(self, endpoint: str, *, version: str) -> None:
        """`endpoint`: HOST:PORT of a collector, or `https://HOST:PORT` for TLS. Raises ConfigError as `check_endpoint`
        does."""
        check_endpoint(endpoint)
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._trace = trace
        target = endpoint if "://" in endpoint else f"http://{endpoint}"
        resource = Resource.create({"service.name": "saccade", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=target, insecure=target.startswith("http://"), timeout=2)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("saccade", version)

    def generation(
        self, parent: TraceContext | None, attributes: Mapping[str, Any], *, seconds: float, prepared: float | None,
        first_token: float | None, failed: str = "",
    ) -> None:  # fmt: skip
        """Writes the spans of a generation that has just ended. `prepared` and `first_token`: seconds from its arrival
        until then; None if it did not get that far. `failed`: the reason of the error, if it failed."""
        end = time.time_ns()
        begin = end - round(seconds * _NANO)
        kind = self._trace.SpanKind.SERVER
        root = self._tracer.start_span(
            "saccade.generate", self._context(parent), kind=kind, start_time=begin,
            attributes={k: v for k, v in attributes.items() if v is not None},
        )  # fmt: skip
        if failed:
            root.set_status(self._trace.Status(self._trace.StatusCode.ERROR, failed))
        inside = self._trace.set_span_in_context(root)
        marks = [0.0, *(moment for moment in (prepared, first_token) if moment is not None), seconds]
        for name, start, stop in zip(("prepare", "first", "decode"), marks, marks[1:], strict=False):
            span = self._tracer.start_span(f"saccade.{name}", inside, start_time=begin + round(start * _NANO))
            span.end(begin + round(stop * _NANO))
        root.end(end)

    def _context(self, parent: TraceContext | None) -> Any:
        """The caller's span, including the flag that says whether the trace is recorded."""
        if parent is None:
            return None
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED if parent.sampled else 0)
        caller = self._trace.SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags)
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(caller))

    def close(self) -> None:
        """Sends the remaining spans, for two seconds at most. Idempotent."""
        self._provider.force_flush(2000)
        self._provider.shutdown()
