"""Cost of the service on top of the engine, and its behaviour under load.

    python -m benchmarks.serve [--only PART,...] [--model demo] [--scale 0.01] [--write]

overhead   the same requests through LocalClient and through gRPC, in turn: cost of a request and of a streamed token
ceiling    streamed tokens/s of one frontend over an engine without a model, read by clients in other processes
closed     a fixed number of callers with mixed images; each sends its next request when the last one is answered
open       requests that arrive at random times at a given rate, independently of answers
memory     resident memory of both processes over many requests, which must not grow
health     health probes while the engine is full: the 99th percentile must stay below 100 ms
pages      72 concurrent requests of four scanned pages each, to a tiny random model of the Qwen3.5 family: the time
           until the frontend has admitted them, and its event loop's longest pause; none may fail. Ignores `--model`

Run it on an idle machine. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

import saccade
from benchmarks import machine
from benchmarks.record import write_result
from service.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
IMAGES = sorted((ROOT / "demo" / "pictures").glob("*.png"))
SERVER = ["--log-level", "error", "--max-seqs", "32"]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * machine.percentile(seconds, share), 2) for name, share in shares.items() if seconds}


# -- overhead ----------------------------------------------------------------------------------------------------------


def overhead(model: str, scale: float) -> dict[str, Any]:
    """Medians over alternating runs, with one caller."""
    turns, tokens = max(5, round(200 * scale)), 100
    options = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}

    def request(client: Any) -> float:
        started = time.perf_counter()
        client.generate("What is it?", max_tokens=1, temperature=0)
        return time.perf_counter() - started

    def stream(client: Any) -> float:
        started = time.perf_counter()
        client.stream("What is it?", **options).final()
        return time.perf_counter() - started

    with ServerProcess([model, *SERVER]) as server, saccade.Client(server.address) as remote:
        with saccade.LocalClient(model, max_seqs=32) as local:
            took: dict[str, list[float]] = {"request_local": [], "request": [], "stream_local": [], "stream": []}
            for turn in range(turns + 2):
                measured = (request(local), request(remote), stream(local), stream(remote))
                if turn >= 2:  # the first two turns include one-time costs
                    for name, seconds in zip(took, measured, strict=True):
                        took[name].append(seconds)
    median = {name: statistics.median(values) for name, values in took.items()}
    return {
        "turns": turns,
        "request_ms": {name: round(1000 * median[name], 3) for name in ("request_local", "request")},
        "per_request_us": round(1e6 * (median["request"] - median["request_local"])),
        "token_us_local": round(1e6 * median["stream_local"] / tokens),
        "per_token_us": round(1e6 * (median["stream"] - median["stream_local"]) / tokens, 1),
    }


# -- the frontend alone ------------------------------------------------------------------------------------------------

READER = """
import asyncio, sys, time
from saccade.v1 import inference_pb2, inference_pb2_grpc
import grpc
address, streams, tokens, chunk = sys.argv[1], *map(int, sys.argv[2:])
async def one(stub):
    request = inference_pb2.StreamGenerateRequest()
    request.request.tokens.ids.extend([1, 2, 3])
    request.request.sampling.max_tokens = tokens
    request.request.sampling.ignore_eos = True
    if chunk > 1:
        request.chunk_tokens = chunk
        request.max_chunk_delay.FromMilliseconds(20)
    count = 0
    async for response in stub.StreamGenerate(request):
        count += len(response.delta.token_ids)
    assert count == tokens, count
async def main():
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await one(stub)
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        await asyncio.gather(*(one(stub) for _ in range(streams)))
        print(time.perf_counter() - started, flush=True)
asyncio.run(main())
"""


def ceiling(model: str, scale: float) -> dict[str, Any]:
    """Tokens/s of all streams together."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from fake_engine import FakeEngine
    from running import RunningServer

    from service.common.config import ServerOptions
    from service.servers.from_options import load_assets

    vocabulary = load_assets(ServerOptions(model=model)).config.decoder.vocab_size
    tokens, streams, readers = max(50, round(2000 * scale)), 32, 2
    found: dict[str, Any] = {"streams": streams * readers, "readers": readers, "tokens_per_stream": tokens}
    for chunk in (1, 16):
        engine = FakeEngine(vocabulary=vocabulary, model=Path(model).name)
        with RunningServer(model, engine=engine) as server:  # in this process, so without image workers
            engine.loop = server.loop
            arguments = [sys.executable, "-c", READER, server.address, str(streams), str(tokens), str(chunk)]
            processes = [
                subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
                for _ in range(readers)
            ]
            for process in processes:
                assert process.stdout is not None and process.stdout.readline() == "ready\n"
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            seconds = [float(process.stdout.readline()) for process in processes if process.stdout is not None]
            for process in processes:
                process.communicate()
        found[f"tokens_per_second_chunk_{chunk}"] = round(streams * readers * tokens / max(seconds))
    return found


# -- load --------------------------------------------------------------------------------------------------------------


class Measured:
    """Latencies and counts of a load's requests."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.whole: list[float] = []
        self.tokens = 0
        self.errors: dict[str, int] = {}

    async def ask(self, client: saccade.AsyncClient, seed: int) -> None:
        """One request with up to three images and 8 to 64 tokens."""
        rng = random.Random(seed)
        images = [IMAGES[rng.randrange(len(IMAGES))] for _ in range(rng.choice([0, 1, 1, 2, 3]))]
        started = previous = time.perf_counter()
        try:
            async with client.stream(
                "What is it?", images=images, max_tokens=rng.randint(8, 64), ignore_eos=True, seed=seed
            ) as stream:
                async for delta in stream:
                    now = time.perf_counter()
                    (self.gaps if previous > started else self.first).append(now - previous)
                    previous = now
                    self.tokens += len(delta.token_ids)
        except saccade.SaccadeError as error:
            self.errors[error.reason] = self.errors.get(error.reason, 0) + 1
        else:
            self.whole.append(time.perf_counter() - started)

    def summary(self, seconds: float) -> dict[str, Any]:
        return {
            "requests": len(self.whole), "errors": self.errors, "seconds": round(seconds, 2),
            "requests_per_second": round(len(self.whole) / seconds, 2),
            "tokens_per_second": round(self.tokens / seconds, 1), "first_token_ms": percentiles(self.first),
            "between_tokens_ms": percentiles(self.gaps), "request_ms": percentiles(self.whole),
        }  # fmt: skip


def closed(model: str, scale: float) -> dict[str, Any]:
    """With 1, 8 and 32 callers."""
    found: dict[str, Any] = {}
    with ServerProcess([model, *SERVER]) as server:
        for callers in (1, 8, 32):
            total = max(callers * 2, round(64 * callers**0.5 * 8 * scale))

            async def run(callers: int = callers, total: int = total) -> dict[str, Any]:
                measured, numbers = Measured(), iter(range(total))
                async with saccade.AsyncClient(server.address) as client:

                    async def caller() -> None:
                        for number in numbers:
                            await measured.ask(client, number)

                    started = time.perf_counter()
                    await asyncio.gather(*(caller() for _ in range(callers)))
                    return measured.summary(time.perf_counter() - started)

            found[f"callers_{callers}"] = asyncio.run(run())
    return found


def open_loop(model: str, scale: float) -> dict[str, Any]:
    """At 50 % and 90 % of the rate that 32 callers get. Arrivals do not wait for answers."""
    found: dict[str, Any] = {}
    with ServerProcess([model, *SERVER]) as server:

        async def run(rate: float | None, total: int) -> dict[str, Any]:
            measured, rng = Measured(), random.Random(1)
            async with saccade.AsyncClient(server.address) as client:
                started, at, tasks = time.perf_counter(), 0.0, []
                for number in range(total):
                    tasks.append(asyncio.create_task(measured.ask(client, number)))
                    if rate is not None:
                        at += rng.expovariate(rate)
                        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
                await asyncio.gather(*tasks)
                return measured.summary(time.perf_counter() - started)

        total = max(32, round(1000 * scale))
        most = asyncio.run(run(None, total))["requests_per_second"]
        found["all_at_once_requests_per_second"] = most
        for share in (0.5, 0.9):
            found[f"rate_{share}"] = {"arrivals_per_second": round(share * most, 2)} | asyncio.run(
                run(share * most, total)
            )
    return found


# -- memory and health -------------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    (line,) = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def _engine_of(pid: int) -> int:
    """The process id of the engine among the server's children."""
    children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
    (engine,) = [c for c in children if b"service.servers.engine_process" in Path(f"/proc/{c}/cmdline").read_bytes()]
    return engine


def memory(model: str, scale: float) -> dict[str, Any]:
    """`growth_bytes_per_request`: growth of each process's resident memory over the second half of the requests."""
    total = max(200, round(50_000 * scale))
    with ServerProcess([model, *SERVER]) as server, saccade.Client(server.address, max_retries=0) as client:
        pids = {"frontend": server.pid, "engine": _engine_of(server.pid)}
        samples: list[dict[str, int]] = []
        with ThreadPoolExecutor(16) as pool:
            for tenth in range(10):
                start = tenth * total // 10

                def ask(number: int) -> None:
                    # few images, so that caches are full early and later growth is not theirs
                    images = [IMAGES[number % len(IMAGES)]] if number % 10 == 0 else []
                    client.generate(f"{number}?", images=images, max_tokens=2, seed=number)

                list(pool.map(ask, range(start, (tenth + 1) * total // 10)))
                samples.append({name: resident(pid) for name, pid in pids.items()})
    half, last = samples[4], samples[-1]
    growth = {name: round((last[name] - half[name]) / (total / 2), 1) for name in pids}
    return {"requests": total, "resident_bytes": samples, "growth_bytes_per_request": growth}


def health(model: str, scale: float) -> dict[str, Any]:
    """A probe every 10 ms on its own connection, while 64 streams compete for 32 sequences."""
    seconds = max(2.0, 60 * scale)
    with ServerProcess([model, *SERVER]) as server, saccade.Client(server.address) as client:
        over = threading.Event()

        def load(number: int) -> None:
            while not over.is_set():
                with client.stream(
                    "x", images=[IMAGES[number % len(IMAGES)]], max_tokens=200, ignore_eos=True
                ) as stream:
                    for _ in stream:
                        if over.is_set():
                            return

        took: list[float] = []
        with ThreadPoolExecutor(64) as pool, grpc.insecure_channel(server.address) as channel:
            running = [pool.submit(load, i) for i in range(64)]
            stub = health_pb2_grpc.HealthStub(channel)
            until = time.perf_counter() + seconds
            try:
                while (started := time.perf_counter()) < until:
                    assert stub.Check(health_pb2.HealthCheckRequest()).status == 1
                    took.append(time.perf_counter() - started)
                    time.sleep(0.01)
            finally:
                over.set()
            for future in running:
                future.result()
        threads = len(list(Path(f"/proc/{_engine_of(server.pid)}/task").iterdir()))
    return {"probes": len(took), "probe_ms": percentiles(took), "streams": 64, "threads_of_the_engine": threads}


# -- pages -------------------------------------------------------------------------------------------------------------

PAGE_SENDER = """
import asyncio, json, sys, time
from pathlib import Path
import saccade
address, folder, requests = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
pages = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))]
async def one(client, number, found):
    try:
        images = [pages[(number + i) % len(pages)] for i in range(4)]
        answer = await client.generate(f"{number}?", images=images, max_tokens=4, ignore_eos=True, timeout=1800)
        found.append((answer.usage.queue_time, answer.usage.time_to_first_token, answer.usage.image_tokens))
    except saccade.SaccadeError as error:
        found.append(error.reason or type(error).__name__)
async def main():
    found = []
    async with saccade.AsyncClient(address, max_retries=0) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        started = time.perf_counter()
        await asyncio.gather(*(one(client, number, found) for number in range(requests)))
        print(json.dumps({"seconds": time.perf_counter() - started, "found": found}), flush=True)
asyncio.run(main())
"""
PAGE = (1786, 2526)
PAGES = 16
"""Number of different pages: neighbouring requests have different ones, and the tiny tower encodes each only once."""


def pages(model: str, scale: float) -> dict[str, Any]:
    """`admission_ms`: from a request's arrival until a decoder step takes it, with its images decoded and encoded."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from running import RunningServer

    from benchmarks.qwen_model import tiny_qwen_model

    requests = max(4, round(72 * scale))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(PAGES):
            _page(number).save(folder / f"{number:02}.jpg", quality=85)
        with RunningServer(
            str(tiny_qwen_model(folder)), dtype=None, max_seqs=32, max_len=8192, max_queue=1024,
            max_inflight_bytes=2**30, image_workers=1,
        ) as server:  # fmt: skip
            arguments = [sys.executable, "-c", PAGE_SENDER, server.address, str(folder), str(requests)]
            sender = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert sender.stdin is not None and sender.stdout is not None
            sender.stdout.readline()
            pauses: list[float] = []
            watch = asyncio.run_coroutine_threadsafe(_pauses(pauses), server.loop)
            sender.stdin.write("go\n")
            sender.stdin.flush()
            answer = json.loads(sender.stdout.readline())
            watch.cancel()
            sender.wait()
    answered = [entry for entry in answer["found"] if isinstance(entry, list)]
    return {
        "requests": requests, "answered": len(answered),
        "errors": [entry for entry in answer["found"] if isinstance(entry, str)],
        "seconds": round(answer["seconds"], 2), "pages_per_second": round(4 * requests / answer["seconds"], 2),
        "page": PAGE, "image_tokens": max((entry[2] for entry in answered), default=0),
        "admission_ms": percentiles([entry[0] for entry in answered]),
        "first_token_ms": percentiles([entry[1] for entry in answered]),
        "event_loop_pause_ms": percentiles(pauses),
    }  # fmt: skip


async def _pauses(found: list[float]) -> None:
    """Measures every 2 ms how late an event loop resumes."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(0.002)
        found.append(time.perf_counter() - started - 0.002)


def _page(number: int) -> Any:
    """Lines of dark marks on paper, like a scanned page."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(number)
    width, height = PAGE
    paper = rng.integers(235, 256, (height, width), np.uint8)
    marks = np.kron(rng.random((height // 6, width // 6)) < 0.35, np.ones((6, 6), bool))
    lines = (np.arange(marks.shape[0]) // 24) % 2 == 0
    paper[: marks.shape[0], : marks.shape[1]][marks & lines[:, None]] = 30
    return Image.fromarray(paper).convert("RGB")


PARTS: dict[str, Callable[[str, float], dict[str, Any]]] = {
    "overhead": overhead, "ceiling": ceiling, "closed": closed, "open": open_loop, "memory": memory, "health": health,
    "pages": pages,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help=f"parts to run: {', '.join(PARTS)}")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full length (default: 1)")
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"{', '.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    result: dict[str, Any] = {
        "benchmark": "serve", "model": arguments.model, "scale": arguments.scale, "load": machine.load(),
        "machine": machine.describe(),
    }  # fmt: skip
    for name in names:
        result[name] = PARTS[name](arguments.model, arguments.scale)
        print(f"{name}: {json.dumps(result[name])}", file=sys.stderr, flush=True)
    if arguments.write:
        parts = "" if names == list(PARTS) else "-" + "-".join(names)
        write_result(f"serve{parts}", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
