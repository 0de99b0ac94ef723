"""Cost of HTTP compared with gRPC: the same requests to `saccade http` and to its gRPC server, in turn.

    python -m benchmarks.http_overhead [--model demo] [--turns N] [--streams 1,64] [--write]

request    seconds of a request for one token, one at a time, over each; the difference is the cost of a request
token      seconds of streams of 100 tokens, 1 and 64 at a time, over each; the difference per token of all streams

Clients are asyncio programs in processes of their own: the SDK's, and one that only splits lines of server-sent events.
Run it on an idle machine. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.record import write_result
from service.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 100

_CLIENT = """
import asyncio, json, sys, time
kind, address, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
ASK = [{"role": "user", "content": "What is it?"}]

async def grpc_client():
    import saccade
    client = saccade.AsyncClient(address)
    async def ask():
        await client.generate(ASK, max_tokens=1, temperature=0)
    async def stream():
        async with client.stream(ASK, max_tokens=tokens, ignore_eos=True, temperature=0) as answer:
            async for _ in answer: pass
    return ask, stream

async def http_client():
    host, _, port = address.rpartition("//")[2].rpartition(":")
    idle = []
    def request(**fields):
        body = json.dumps({"messages": ASK, "temperature": 0, **fields}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n"
        return head.encode() + b"content-length: %d\\r\\n\\r\\n" % len(body) + body
    whole, streamed = request(max_tokens=1), request(max_tokens=tokens, ignore_eos=True, stream=True)
    async def exchange(data):
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port), limit=2**20)
        writer.write(data)
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        assert b" 200 " in head[:20], head
        if b"chunked" in head.lower():
            while (size := int(await reader.readline(), 16)):
                await reader.readexactly(size + 2)
            await reader.readline()
        else:
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\\r")[0])
            await reader.readexactly(length)
        idle.append((reader, writer))
    return (lambda: exchange(whole)), (lambda: exchange(streamed))

async def main():
    ask, stream = await (grpc_client() if kind == "grpc" else http_client())
    await ask(); await stream()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while (line := await loop.run_in_executor(None, sys.stdin.readline)):
        what, count = line.split()
        began = time.perf_counter()
        if what == "ask":
            for _ in range(int(count)): await ask()
        else:
            await asyncio.gather(*(stream() for _ in range(int(count))))
        print(time.perf_counter() - began, flush=True)
asyncio.run(main())
"""


class Client:
    """A client process, which executes commands and reports the seconds of each."""

    def __init__(self, kind: str, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, kind, address, str(TOKENS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        assert self._out.readline() == "ready\n", "the client could not start"

    def seconds(self, what: str, count: int) -> float:
        self._in.write(f"{what} {count}\n")
        self._in.flush()
        return float(self._out.readline())

    def close(self) -> None:
        self._in.close()
        self._process.wait()


def measure(model: str, turns: int, streams: Sequence[int]) -> dict[str, Any]:
    """Medians over alternating turns."""
    with ServerProcess([model, "--http-port", "0", "--max-seqs", "64", "--log-level", "error"]) as server:
        clients = {"grpc": Client("grpc", server.address), "http": Client("http", server.http_url)}
        try:
            return _turns(clients, turns, streams)
        finally:
            for client in clients.values():
                client.close()


def _turns(clients: dict[str, Client], turns: int, streams: Sequence[int]) -> dict[str, Any]:
    asks = 20
    took: dict[tuple[str, str], list[float]] = {}
    for turn in range(turns + 1):
        for name, client in clients.items():
            found = {"request": client.seconds("ask", asks) / asks}
            found |= {f"streams_{n}": client.seconds("stream", n) for n in streams}
            for what, seconds in found.items():
                if turn:  # the first turn includes one-time costs
                    took.setdefault((name, what), []).append(seconds)
    middle = {key: statistics.median(values) for key, values in took.items()}
    cost = {"request_ms": {name: round(1000 * middle[name, "request"], 3) for name in clients}}
    cost["request_ms"]["http_costs"] = round(1000 * (middle["http", "request"] - middle["grpc", "request"]), 3)
    for n in streams:
        what = f"streams_{n}"
        per = {name: round(1e6 * middle[name, what] / (n * TOKENS), 2) for name in clients}
        cost[f"us_per_token_{n}_streams"] = {**per, "http_costs": round(per["http"] - per["grpc"], 2)}
    return cost


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--streams", default="1,64")
    parser.add_argument("--write", action="store_true", help="write a dated result")
    options = parser.parse_args(argv)
    counts = [int(n) for n in options.streams.split(",")]
    result = {
        "benchmark": "http_overhead", "date": str(datetime.date.today()), "machine": machine.describe(),
        "model": options.model, "turns": options.turns, "tokens": TOKENS,
        **measure(options.model, options.turns, counts),
    }  # fmt: skip
    if options.write:
        print(f"written to {write_result('http-overhead', result)}", file=sys.stderr)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
