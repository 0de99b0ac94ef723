"""The access log: one line for each request, without prompt or answer."""

from __future__ import annotations

import json
import logging
from typing import Any

from service.telemetry.call_context import CallInfo

log = logging.getLogger("service.access")


class AccessLog:
    """One line for each request: `key=value` pairs, or a JSON object."""

    def __init__(self, *, as_json: bool = False) -> None:
        self._as_json = as_json

    def write(self, info: CallInfo, **values: Any) -> None:
        if not log.isEnabledFor(logging.INFO):
            return
        entry: dict[str, Any] = {
            "method": info.method,
            "code": info.code,
            "reason": info.reason,
            "tenant": info.tenant.name,
            "request_id": info.request_id,
            "trace_id": info.trace.trace_id if info.trace else "",
            "request_bytes": info.request_bytes,
            **values,
        }
        entry = {k: round(v, 6) if isinstance(v, float) else v for k, v in entry.items() if v not in ("", None)}
        if self._as_json:
            log.info("%s", json.dumps(entry))
        else:
            log.info("%s", " ".join(f"{k}={json.dumps(v) if isinstance(v, str) else v}" for k, v in entry.items()))
