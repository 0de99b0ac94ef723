"""Encoding in the engine's process and in another one: overlap, gaps in streams, latency per image, bytes per second.

    python -m benchmarks.handoff [--only overlap,gaps,latency,bytes] [--rounds N] [--folder DIR] [--write]

Three modes: `turns` (in the engine's process, one launch per decoder step), `process` (a process of its own, shared
memory), `remote` (a server of role encoder, gRPC over the loopback interface).

overlap   time to first token of a request with 512 tokens of text and then an image, against encoding the image first
          and then computing the text (encode-then-prefill, two calls). Limit: the longer of the two parts, if encoder
          and decoder have their own cores; no gain if they share them.
gaps      time between two tokens of four running streams, alone and while images arrive one after the other. In the
          mode `turns` the scheduling policy bounds it; with two processes it depends on the operating system.
latency   with a tower that does almost no work: seconds from an image's request to its rows in each mode, minus the
          seconds of the same work in one thread.
bytes     with the same tower: pixels and rows per second through each transport, against the same bytes through a plain
          TCP socket on the loopback interface, which is the limit of `remote`.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, models
from benchmarks.record import add_options, write_result
from decoder.sampling import SamplingParams
from encoder.item import EncoderItem
from kernels.cores import available_cores
from service.commands.server_process import ServerProcess
from service.common.config import EngineOptions
from service.encoding.encoder import Encoding
from service.encoding.handoff import Handoff
from service.engine.build import connect_encoders, local_encoder, start_encoder_process
from service.engine.engine_client import EngineProcess
from service.engine.types import EngineEvent, EngineRequest
from service.media.prepared import PreparedItem
from service.model.checkpoint import open_checkpoint
from service.model.resolve import resolve_vision

PARTS = ("overlap", "gaps", "latency", "bytes")
WAYS = ("turns", "process", "remote")
SIDE = 32
"""Patches per side: 256 image tokens."""
TEXT_TOKENS = 512
PIECE = 1 << 20
_keys = count(1)


def noise_image(side: int = SIDE, patch: int = 16) -> PreparedItem:
    """A noise image that no cache has seen, with `side` patches per side."""
    number = next(_keys)
    generator = torch.Generator().manual_seed(number)
    patches = torch.randn(side * side, 3 * patch * patch, generator=generator).bfloat16()
    return PreparedItem(EncoderItem((side, side), patches), key=number.to_bytes(32, "big"))


@contextmanager
def encoder_server(path: Path, threads: int) -> Iterator[str]:
    arguments = [str(path), "--role", "encoder", "--threads", str(threads), "--log-level", "error"]
    arguments += ["--max-inflight-bytes", "4Gi"]  # for the largest image that the thin model allows
    with ServerProcess(arguments) as server:
        yield server.address


@contextmanager
def options_of(way: str, path: Path, threads: int, **changes: Any) -> Iterator[EngineOptions]:
    """The engine's options for an encoding mode; starts the server that the mode needs."""
    values: dict[str, Any] = {"model": str(path), "threads": threads, "state_cache": "none", **changes}
    with ExitStack() as ends:
        if way == "process":
            values["encoder_process"] = True
        elif way == "remote":
            values |= {"role": "decoder", "encoders": (ends.enter_context(encoder_server(path, threads)),)}
        yield EngineOptions(**values)


class Asker:
    """An engine in its process, and the times of its events."""

    def __init__(self, options: EngineOptions) -> None:
        self.engine = EngineProcess(options)
        self._names = count()
        self._queues: dict[str, queue.SimpleQueue[tuple[float, EngineEvent]]] = {}
        self.engine.start(self._deliver)

    def _deliver(self, events: list[EngineEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise SystemExit(f"{event.request_id}: {event.message}")
            self._queues[event.request_id].put((now, event))

    def submit(self, ids: list[int], tokens: int, images: tuple[PreparedItem, ...] = (), **fields: Any) -> str:
        name = f"r{next(self._names)}"
        self._queues[name] = queue.SimpleQueue()
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(EngineRequest(name, ids, sampling, images, **fields))
        return name

    def times(self, name: str) -> Iterator[float]:
        """The time of each event of a request, until its end."""
        while True:
            moment, event = self._queues[name].get()
            yield moment
            if event.finish_reason is not None:
                del self._queues[name]
                return

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


# -- the parts ---------------------------------------------------------------------------------------------------------


def first_token(asker: Asker, text: list[int], image: PreparedItem, *, separately: bool) -> float:
    """Seconds until the first token about `text` and then `image`."""
    ids = [*text, *[models.IMAGE_TOKEN] * image.length]
    placed = replace(image, start=len(text))
    started = time.perf_counter()
    if separately:
        list(asker.times(asker.submit([], 1, (image,), embed="image")))
    return list(asker.times(asker.submit(ids, 1, (placed,))))[0] - started


def measure_overlap(path: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    for way in WAYS:
        together, apart = [], []
        with options_of(way, path, threads, max_seqs=4) as options, Asker(options) as asker:
            for number in range(rounds + 1):
                text = [rng.randrange(10, models.VOCAB - 10) for _ in range(TEXT_TOKENS)]
                pair = (
                    first_token(asker, text, noise_image(), separately=False),
                    first_token(asker, text, noise_image(), separately=True),
                )
                if number:  # the first pair warms up
                    together.append(pair[0])
                    apart.append(pair[1])
        overlapped, one_by_one = statistics.median(together), statistics.median(apart)
        ratio = statistics.median(b / a for a, b in zip(together, apart))
        rows.append({
            "way": way, "overlapped_s": overlapped, "encode_then_prefill_s": one_by_one, "ratio": ratio,
            "all": [together, apart],
        })  # fmt: skip
        print(
            f"{way:8} first token after {1e3 * overlapped:7.1f} ms, encode-then-prefill {1e3 * one_by_one:7.1f} ms, "
            f"ratio {ratio:.2f}",
            flush=True,
        )
    return rows


def gaps_of(asker: Asker, streams: int, tokens: int, images: int) -> tuple[list[float], float]:
    """Gaps between the tokens of `streams` requests while `images` images arrive one after the other, and the seconds
    that one image took."""
    rng = random.Random(0)
    prompts = [[rng.randrange(10, models.VOCAB - 10) for _ in range(16)] for _ in range(streams)]
    moments: list[list[float]] = [[] for _ in prompts]
    names = [asker.submit(prompt, tokens) for prompt in prompts]

    def collect(index: int) -> None:
        moments[index] += asker.times(names[index])

    threads = [threading.Thread(target=collect, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    for _ in range(images):
        list(asker.times(asker.submit([], 1, (noise_image(),), embed="image")))
    spent = time.perf_counter() - began
    busy_until = began + spent if images else float("inf")
    for thread in threads:
        thread.join()
    gaps = [b - a for times in moments for a, b in zip(times, times[1:]) if b <= busy_until]
    return gaps, spent / max(images, 1)


def measure_gaps(path: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for way in WAYS:
        with options_of(way, path, threads, max_seqs=8) as options, Asker(options) as asker:
            gaps_of(asker, 4, 20, 1)
            alone, _ = gaps_of(asker, 4, 40 * rounds, 0)
            busy, each = gaps_of(asker, 4, 400 * rounds, 4 * rounds)
        row: dict[str, Any] = {"way": way, "image_s": each}
        for name, gaps in (("alone", alone), ("with_images", busy)):
            row[name] = {f"p{round(100 * q)}_ms": 1e3 * machine.percentile(gaps, q) for q in (0.5, 0.99, 1.0)}
        rows.append(row)
        print(
            f"{way:8} gaps p50/p99/max alone "
            + "/".join(f"{v:.1f}" for v in row["alone"].values())
            + " ms, while images arrive "
            + "/".join(f"{v:.1f}" for v in row["with_images"].values())
            + f" ms, an image in {1e3 * each:.0f} ms",
            flush=True,
        )
    return rows


class Bench:
    """A handoff queue and an encoder in one mode, without a decoder."""

    def __init__(self, way: str, options: EngineOptions) -> None:
        checkpoint = open_checkpoint(options.model)
        vision = resolve_vision(options, checkpoint)
        assert vision is not None
        self.handoff = Handoff(256 << 20, vision.row_width, torch.bfloat16)
        self._changed = threading.Event()
        make: dict[str, Callable[[], Encoding]] = {
            "turns": lambda: local_encoder(options, checkpoint, vision, self.handoff),
            "process": lambda: start_encoder_process(options, vision, self.handoff),
            "remote": lambda: connect_encoders(options, checkpoint, vision, self.handoff),
        }
        torch.set_num_threads(options.threads or 1)
        self.encoding = make[way]()
        self.handoff.on_change = self._on_change
        self.encoding.start(self._fail)

    def _on_change(self) -> None:
        self._changed.set()
        self.encoding.wake()

    @staticmethod
    def _fail(error: BaseException) -> None:
        raise SystemExit(f"the encoder failed: {error}")

    def encode(self, images: Sequence[PreparedItem]) -> None:
        """Encodes all images, with as many in progress as fit."""
        leases = [self.handoff.lease(image.key, image.encoder_item) for image in images]
        while not all(lease.ready for lease in leases):
            self._changed.clear()
            if not self.encoding.run_time_slice() and not all(lease.ready for lease in leases):
                self._changed.wait(1.0)
        for lease in leases:
            lease.release()
        self.handoff.flush()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.encoding.close()


def measure_latency(path: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    """One thread each, so that the difference is the transport."""
    rows = []
    for side in (8, 16, 32):
        base = 0.0
        for way in WAYS:
            with options_of(way, path, threads, graphs="off") as options, Bench(way, options) as bench:
                bench.encode([noise_image(side, models.THIN_PATCH)])
                took = []
                for _ in range(5 * rounds):
                    image = noise_image(side, models.THIN_PATCH)
                    started = time.perf_counter()
                    bench.encode([image])
                    took.append(time.perf_counter() - started)
            median = statistics.median(took)
            base = base or median
            size = image.encoder_item.nbytes
            added = median - base
            rows.append({"way": way, "bytes": size, "median_s": median, "added_s": added, "all": took})
            print(f"{size / 1e6:5.1f} MB {way:8} {1e3 * median:7.2f} ms, added {1e3 * added:6.2f} ms", flush=True)
    return rows


def socket_rate(there: int, back: int, repeats: int) -> float:
    """Bytes per second of a loopback TCP connection that sends `there` bytes one way and `back` bytes the other, in
    chunks, one image after the other."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            buffer, payload = bytearray(PIECE), bytes(back)
            for _ in range(repeats):
                left = there
                while left:
                    left -= connection.recv_into(buffer, min(left, PIECE))
                connection.sendall(payload)

    thread = threading.Thread(target=answer)
    thread.start()
    with socket.create_connection(listener.getsockname()) as connection:
        payload, buffer = bytes(there), bytearray(PIECE)
        started = time.perf_counter()
        for _ in range(repeats):
            connection.sendall(payload)
            left = back
            while left:
                left -= connection.recv_into(buffer, min(left, PIECE))
        took = time.perf_counter() - started
    thread.join()
    listener.close()
    return repeats * (there + back) / took


def measure_bytes(path: Path, threads: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    images = [noise_image(16, models.THIN_PATCH) for _ in range(8 * rounds)]
    pixels = images[0].encoder_item.patches
    there, back = pixels.numel() * pixels.itemsize, images[0].length * models.TEXT["hidden_size"] * 2
    ceiling = socket_rate(there, back, len(images))
    print(f"plain socket: {ceiling / 1e9:.2f} GB/s ({there} bytes there, {back} back)", flush=True)
    for way in WAYS:
        with options_of(way, path, threads, graphs="off") as options, Bench(way, options) as bench:
            bench.encode([noise_image(16, models.THIN_PATCH)])
            started = time.perf_counter()
            bench.encode(images)
            took = time.perf_counter() - started
        rate = len(images) * (there + back) / took
        rows.append({"way": way, "bytes_s": rate, "socket_bytes_s": ceiling, "fraction": rate / ceiling})
        print(f"{way:8} {rate / 1e9:6.2f} GB/s, {rate / ceiling:.0%} of the plain socket", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=available_cores().usable, help="threads of each engine and encoder"
    )
    add_options(parser)
    arguments = parser.parse_args(argv)
    parts = arguments.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, got {arguments.only}")
    before = machine.before()
    print(json.dumps({**machine.describe(), "load": before.load}), flush=True)
    started = time.perf_counter()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    measures = {"overlap": measure_overlap, "gaps": measure_gaps, "latency": measure_latency, "bytes": measure_bytes}
    for part in parts:
        thin = part in ("latency", "bytes")
        path = models.thin_omni_model(arguments.folder) if thin else models.omni_model(arguments.folder)
        result[part] = measures[part](path, 1 if thin else arguments.threads, arguments.rounds)
    result["seconds"] = time.perf_counter() - started
    result = {**machine.header("handoff", argv, before), "threads": arguments.threads, **result}
    if arguments.write:
        print(f"written to {write_result('handoff', result)}", file=sys.stderr)
    print(json.dumps(summary(result)))
    return 0


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The main numbers, for the last line of the output."""
    short: dict[str, Any] = {"seconds": round(result["seconds"], 1)}
    for row in result.get("overlap", ()):
        short[f"overlap {row['way']}"] = round(row["ratio"], 3)
    for row in result.get("gaps", ()):
        short[f"gap p99 {row['way']}"] = [round(row[name]["p99_ms"], 1) for name in ("alone", "with_images")]
    for row in result.get("latency", ()):
        short[f"added ms {row['way']} {row['bytes'] / 1e6:.1f} MB"] = round(1e3 * row["added_s"], 2)
    for row in result.get("bytes", ()):
        short[f"of the socket {row['way']}"] = round(row["fraction"], 3)
    return short


if __name__ == "__main__":
    sys.exit(main())
