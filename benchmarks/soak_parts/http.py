"""The HTTP server under hostile requests and clients: 10,000 bad requests, 500 streams that vanish and 50 slow readers.

No answer may be 5xx or 200, and at the end neither server may hold anything.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
            RunningServer(str(model), max_seqs=32, max_len=600) as server,
            RunningHttp([server.address], stall_timeout=2.0) as http,
        ):
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
            slow = [_open(http.port) for _ in range(max(1, round(SLOW * scale)))]
            http.idle()  # their streams are dropped after the stall timeout
            for connection in slow:
                connection.close()
            stats = server.drained()
    wrong = {status: count for status, count in told.items() if status and not 400 <= status < 500}
    numbers = {"statuses": {str(status): count for status, count in sorted(told.items())}, "wrong": wrong}
    return Outcome(not wrong and stats["decoder"]["used_slots"] == 0, numbers)


def _open(port: int) -> socket.socket:
    """A stream that nobody reads."""
    document = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True, "stream": True,
        "logprobs": True, "top_logprobs": 20, "n": 4,
    }  # fmt: skip
    body = json.dumps(document).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
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
