"""`saccade top`: shows the state of a running server periodically. Calls `AdminService.GetLoads`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from saccade._core.methods import one_call
from saccade._core.steps import Call
from saccade._sync.client import Client
from saccade.connection_options import tls_settings
from saccade.errors import InvalidArgument
from saccade.v1 import admin_pb2

BAR = 30
ANSWER_SECONDS = 10.0
"""Seconds that one update may take, all attempts together."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def _bar(used: float, total: float) -> str:
    filled = round(BAR * used / total) if total else 0
    return f"[{'#' * filled}{' ' * (BAR - filled)}] {100 * used / total if total else 0:3.0f}%"


def screen(loads: admin_pb2.GetLoadsResponse, title: str) -> list[str]:
    """The lines of one view."""
    used = loads.total_blocks - loads.free_blocks
    return [
        f"{title}{'   DRAINING' if loads.draining else ''}",
        f"requests   {loads.live_requests} in the server: {loads.running} running, {loads.waiting} waiting",
        f"state      {_bar(used, loads.total_blocks)}  {used} of {loads.total_blocks} blocks",
        f"images     {_bar(loads.handoff_used_bytes, loads.handoff_capacity_bytes)}  "
        f"{size(loads.handoff_used_bytes)} of {size(loads.handoff_capacity_bytes)}",
        f"messages   {size(loads.inflight_bytes)} in flight, {size(loads.media_bytes)} of uploaded media",
    ]


def line(loads: admin_pb2.GetLoadsResponse) -> str:
    """The same in one line, for logs."""
    return (
        f"live={loads.live_requests} running={loads.running} waiting={loads.waiting} "
        f"blocks={loads.total_blocks - loads.free_blocks}/{loads.total_blocks} "
        f"handoff={loads.handoff_used_bytes}/{loads.handoff_capacity_bytes} inflight={loads.inflight_bytes} "
        f"media={loads.media_bytes} draining={int(loads.draining)}"
    )


def run(options: argparse.Namespace, stream: TextIO | None = None, pause: Callable[[float], None] = time.sleep) -> int:
    """Shows the state until it is interrupted, or `options.count` times. Returns the exit code; raises SaccadeError."""
    out = stream if stream is not None else sys.stdout
    terminal = out.isatty()
    shown = 0
    if not 0 <= options.interval < float("inf"):
        raise InvalidArgument(f"--interval: expected 0 or more seconds, got {options.interval:g}")
    if options.count is not None and options.count < 1:
        raise InvalidArgument(f"--count: expected 1 or more updates, got {options.count}")
    if "," in options.server:
        raise InvalidArgument(f"--server: expected one address, got {options.server!r}")
    with Client(options.server, tls=tls_settings(options), timeout=ANSWER_SECONDS) as client:
        title = f"{options.server}  {client.get_model().name}"
        while True:
            loads: Any = client._run(one_call(Call("admin", "GetLoads", admin_pb2.GetLoadsRequest())), None)
            if terminal:  # move to the top left, erase each line's end, and erase what is below
                print(
                    "\x1b[H" + "".join(f"{text}\x1b[K\n" for text in screen(loads, title)) + "\x1b[J", end="", file=out
                )
            else:
                print(line(loads), file=out)
            out.flush()
            shown += 1
            if options.count is not None and shown >= options.count:
                return 0
            pause(options.interval)
