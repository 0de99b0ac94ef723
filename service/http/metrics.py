"""`/metrics`: the HTTP server's own counters for Prometheus. Those of gRPC servers are on their `--metrics-port`."""

from __future__ import annotations

from service.http.call import Front, HttpCall


async def metrics(call: HttpCall) -> None:
    """Counters and gauges in Prometheus's text format."""
    await call.respond_bytes(exposition(call.front).encode(), "text/plain; version=0.0.4; charset=utf-8")


def exposition(front: Front) -> str:
    """The metrics of the process."""
    lines = [
        "# HELP saccade_http_requests_total HTTP requests that have ended; 499: the client went away",
        "# TYPE saccade_http_requests_total counter",
    ]
    for (route, status), count in sorted(front.calls.items()):
        lines.append(f'saccade_http_requests_total{{route="{route}",status="{status}"}} {count}')
    gauges = {
        "saccade_http_running": ("HTTP requests in progress", front.running),
        "saccade_http_streams": ("answers that are being streamed", front.streams),
        "saccade_http_body_bytes": ("bytes of request bodies that are held", front.budget.used),
        "saccade_http_file_bytes": ("bytes of uploaded files", front.files.used),
    }
    for name, (text, value) in gauges.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name} {value}"]
    return "\n".join(lines) + "\n"
