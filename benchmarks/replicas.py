"""Cache hit rates of several replicas behind one client: with affinity, with round robin, and with one replica alone.

    python -m benchmarks.replicas [--model demo] [--images 24] [--replicas 3] [--write]

Each image gets ten questions, one after the other, from a client of its own; several images' clients run concurrently.
The hit rate is the share of prompt tokens whose state was cached. In the last run one replica is killed when half of
the answers have arrived. All answers must equal those of one replica alone. Target: the hit rate with affinity is at
most 5 % below that of one replica, and with the kill it loses no more than the images of the killed replica. The last
line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import numpy as np

import saccade
from benchmarks import machine
from benchmarks.record import write_result
from saccade.v1 import admin_pb2, admin_pb2_grpc
from service.commands.server_process import ServerProcess

QUESTIONS = 10
ASKERS = 4
ALLOWED_LOSS = 0.05


@dataclasses.dataclass(frozen=True)
class Hits:
    """One run. The hit rate is cached prompt tokens over prompt tokens."""

    name: str
    rate: float
    seconds: float
    answers: list[list[int]] = dataclasses.field(repr=False)
    """Token ids, by image and question."""


def image(number: int) -> Any:
    """Noise: uint8 `[64, 64, 3]`."""
    return np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def ask_all(name: str, address: str, images: int, options: dict[str, Any], after: Callable[[int], None]) -> Hits:
    """Asks ten questions about each image. `after` is called with the number of answers after each."""
    lock, done, cached, prompt = threading.Lock(), 0, 0, 0

    def ask(number: int) -> list[list[int]]:
        nonlocal done, cached, prompt
        found = []
        with saccade.Client(address, timeout=120, **options) as client:
            for question in range(QUESTIONS):
                stream = client.stream(
                    f"Question {question}: what does it show?", images=[image(number)], max_tokens=8,
                    temperature=0.8, seed=question, ignore_eos=True,
                )  # fmt: skip
                answer = stream.final()
                found.append(answer.token_ids)
                with lock:
                    done += 1
                    cached += answer.usage.cached_tokens
                    prompt += answer.usage.prompt_tokens
                    after(done)
        return found

    started = time.perf_counter()
    with ThreadPoolExecutor(ASKERS) as pool:
        answers = [ids for found in pool.map(ask, range(images)) for ids in found]
    return Hits(name, cached / prompt, time.perf_counter() - started, answers)


def flush(address: str) -> None:
    """Empties a server's caches."""
    with grpc.insecure_channel(address) as channel:
        admin_pb2_grpc.AdminServiceStub(channel).FlushCache(admin_pb2.FlushCacheRequest())


def measure(arguments: Sequence[str], images: int, replicas: int) -> list[Hits]:
    """Runs with one replica, and with several: round robin, affinity, and affinity while a replica is killed. Each run
    begins with empty caches.

    Args:
        arguments: those of `saccade serve`.
    """
    with ExitStack() as ends:
        servers = [ends.enter_context(ServerProcess([*arguments, "--admin"])) for _ in range(replicas)]
        return compare([server.address for server in servers], images, servers[0].pid)


def compare(addresses: Sequence[str], images: int, first: int) -> list[Hits]:
    """The runs of `measure`, with running replicas.

    Args:
        first: process id of the first replica, which is killed.
    """
    found = []

    def strike(done: int) -> None:
        if done == images * QUESTIONS // 2:
            os.kill(first, signal.SIGKILL)

    one, several = addresses[0], ",".join(addresses)
    runs: list[tuple[str, str, dict[str, Any], Callable[[int], None]]] = [
        ("one replica", one, {}, lambda done: None),
        ("in turns", several, {}, lambda done: None),
        ("affinity", several, {"affinity": "auto"}, lambda done: None),
        ("affinity, one killed", several, {"affinity": "auto"}, strike),
    ]
    for name, address, options, after in runs:
        found.append(ask_all(name, address, images, options, after))
        for each in addresses:
            if "killed" not in name:
                flush(each)
    return found


def judge(found: Sequence[Hits], images: int) -> dict[str, bool]:
    """Whether the targets are met."""
    one, turns, affinity, killed = found
    # Each image of the killed replica is prefilled once more; at worst it had all images.
    again = images / (images * QUESTIONS)
    return {
        "same_answers": all(hits.answers == one.answers for hits in found),
        "affinity": affinity.rate >= (1 - ALLOWED_LOSS) * one.rate,
        "better_than_in_turns": affinity.rate > turns.rate,
        "killed": killed.rate >= (1 - ALLOWED_LOSS) * (one.rate - again),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the hit rates. Returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args(argv)
    arguments = [options.model, "--log-level", "error", "--threads", "1", "--max-seqs", "8", "--no-warmup"]
    found = measure(arguments, options.images, options.replicas)
    for hits in found:
        print(f"{hits.name:22} {100 * hits.rate:5.1f} % of prompt tokens cached, {hits.seconds:6.1f} s")
    result = {
        "machine": machine.describe(),
        "load": machine.load(),
        "images": options.images,
        "questions": QUESTIONS,
        "replicas": options.replicas,
        "hit_rate": {hits.name: round(hits.rate, 4) for hits in found},
        "seconds": {hits.name: round(hits.seconds, 2) for hits in found},
        "met": judge(found, options.images),
    }
    if options.write:
        write_result("replicas", result)
    print(json.dumps(result))
    return 0 if all(result["met"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
