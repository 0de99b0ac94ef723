"""`/metrics`: the HTTP server's own counters for Prometheus. Those of gRPC servers are on their `--metrics-port`."""

from __future__ import annotations

from service.http.call import Front, HttpCall
from service.telemetry.metric_names import METRICS


async def metrics(call: HttpCall) -> None:
    """Counters and gauges in Prometheus's text format."""
    await call.respond_bytes(exposition(call.front).encode(), "text/plain; version=0.0.4; charset=utf-8")


def exposition(front: Front) -> str:
    """The metrics of the process."""
    requests = {
        f'{{route="{route}",status="{status}"}}': count for (route, status), count in sorted(front.calls.items())
    }
    gauges = {
        "http_running": front.running, "http_streams": front.streams, "http_body_bytes": front.budget.used,
        "http_file_bytes": front.files.used,
    }  # fmt: skip
    lines = []
    for name, values in {"http_requests": requests, **{name: {"": value} for name, value in gauges.items()}}.items():
        declared = METRICS[name]
        lines += [f"# HELP {declared.exported} {declared.documentation}", f"# TYPE {declared.exported} {declared.kind}"]
        lines += [f"{declared.exported}{labels} {value}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"
