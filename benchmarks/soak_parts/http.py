"""The HTTP server under hostile requests and clients: 10,000 bad requests, 500 streams that vanish and 50 that nobody
reads, beside a slow reader that gets its whole answer.

No bad request may be answered with 5xx or 200; at the end neither server may hold anything, and the process has the
descriptors and tasks that it had before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.soak import Outcome

SUPPORT = str(Path(__file__).resolve().parents[2] / "tests" / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

REQUESTS, VANISHING, SLOW = 10_000, 500, 50
SEEDS = 4


def run(scale: float) -> Outcome:
    """Returns the statuses that were answered."""
    from http_fuzz import bad_request, send
    from running import RunningServer
    from running_http import RunningHttp
    from served import make_served

    with tempfile.TemporaryDirectory() as folder:
        model = make_served(Path(folder) / "tiny").path
        with (
            RunningServer(str(model), max_seqs=32, max_len=600, image_workers=1) as server,
            RunningHttp([server.address], stall_timeout=2.0) as http,
        ):
            plain = _read_slowly(http.port)
            before = _held(http)
            each = max(10, round(REQUESTS * scale)) // SEEDS

            def fuzz(seed: int) -> Counter[int]:
                rng = random.Random(seed)
                return Counter(send(http.port, bad_request(rng)) for _ in range(each))

            with ThreadPoolExecutor(SEEDS) as pool:
                told = sum(pool.map(fuzz, range(SEEDS)), Counter[int]())
            http.idle()
            server.drained()
            for _ in range(max(1, round(VANISHING * scale) // 25)):
                _leave(http.port, 25)
            http.idle()
            server.drained()
            unread = [_open(http.port) for _ in range(max(1, round(SLOW * scale)))]
            same = _read_slowly(http.port) == plain
            http.idle()  # the streams that nobody reads are dropped after the stall timeout
            for connection in unread:
                connection.close()
            stats = server.drained()
            after = _held(http)
    wrong = {status: count for status, count in told.items() if status and not 400 <= status < 500}
    numbers = {
        "statuses": {str(status): count for status, count in sorted(told.items())}, "wrong": wrong,
        "vanished": max(1, round(VANISHING * scale) // 25) * 25, "unread": len(unread), "slow_reader_got_all": same,
        "held_before": before, "held_after": after,
    }  # fmt: skip
    leaked = {name: (before[name], count) for name, count in after.items() if count > before[name]}
    return Outcome(not wrong and not leaked and same and stats["decoder"]["used_slots"] == 0, numbers)


def _held(http: Any) -> dict[str, int]:
    """What the process and the HTTP server's loop hold, once connections that were closed are gone."""

    async def tasks() -> int:
        while http.http.server_state.connections:
            await asyncio.sleep(0.01)
        return len(asyncio.all_tasks())

    count = asyncio.run_coroutine_threadsafe(tasks(), http.loop).result(60)
    return {"descriptors": len(os.listdir("/proc/self/fd")), "tasks": count}


def _read_slowly(port: int) -> tuple[str, list[Any], str]:
    """A stream that is read in small pieces, through a small buffer: its text, tokens and finish reason. A full
    queue is tried again."""
    received = b""
    while not received.startswith(b"HTTP/1.1 200"):
        received = b""
        with _open(port, max_tokens=200, n=1, seed=1) as connection:
            while piece := connection.recv(512):
                received += piece
    text, tokens, reason = "", [], ""
    for line in received.split(b"\n"):
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            text += choice["delta"].get("content", "")
            tokens += (choice["logprobs"] or {}).get("content", [])
            reason = choice["finish_reason"] or reason
    return text, tokens, reason


def _open(port: int, **fields: int) -> socket.socket:
    """A stream, of which nothing is read."""
    document = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True, "stream": True,
        "logprobs": True, "top_logprobs": 20, "n": 4, **fields,
    }  # fmt: skip
    body = json.dumps(document).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += "content-type: application/json\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


def _leave(port: int, count: int) -> None:
    """Streams whose clients go away after the first bytes of one of them."""
    opened = [_open(port) for _ in range(count)]
    opened[0].recv(20)
    for connection in opened:
        connection.close()
