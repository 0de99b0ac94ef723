"""Encoders that are killed, paused or disconnected under load; every answer must equal that of a server with a built-in
encoder.

First a thousand concurrent requests for one image. Then rounds of eight requests with images of their own; in each, one
of two encoders is killed while encoding, or paused beyond its lease and resumed, or a client disconnects. In the end
nothing may be leased, quarantined or left in shared memory.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import saccade
from benchmarks.machine import free_port
from benchmarks.noise import noise_png
from benchmarks.soak import Outcome
from service.commands.server_process import ServerProcess

HERD, ROUNDS, CROWD = 1000, 100, 8
LEASE = 5.0
COMMON = ["demo", "--dtype", "float32", "--threads", "1", "--log-level", "error"]
FAULTS = ("kill", "stall", "leave", "none")


def noise_image(number: int) -> bytes:
    """A PNG of noise, different for each number."""
    rng = random.Random(number)
    width, height = rng.randint(16, 200), rng.randint(16, 200)
    return noise_png(rng, width, height)


def ask(client: saccade.Client, number: int) -> list[int]:
    return client.generate(
        f"{number}?", images=[noise_image(number)], max_tokens=8, ignore_eos=True, temperature=0, timeout=300
    ).token_ids


def metrics(port: int) -> dict[str, float]:
    """Metrics without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.MULTILINE)}


class Encoder:
    """An encoder that can be restarted on the same port."""

    def __init__(self) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self.start()

    def start(self) -> None:
        watched = ["--metrics-port", str(self.metrics_port)]
        self.process = ServerProcess([*COMMON, "--role", "encoder", *watched], port=self.port)

    def stop(self) -> None:
        self.process.stop()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.stop()


def one_round(
    number: int, fault: str, encoder: Encoder, pool: ThreadPoolExecutor, apart: saccade.Client, port: int
) -> list[Any]:
    """Sends eight requests with one fault among them; returns their answers."""
    numbers = [1000 + number * CROWD + i for i in range(CROWD)]
    given = metrics(port)["saccade_encoder_given_total"]
    if fault in ("kill", "stall"):
        os.kill(encoder.process.pid, signal.SIGSTOP)
    futures = [pool.submit(ask, apart, n) for n in numbers]
    if fault == "leave":
        with apart.stream("never mind", images=[noise_image(numbers[0])], max_tokens=50, ignore_eos=True):
            pass
    if fault == "kill":
        while metrics(port)["saccade_encoder_given_total"] < given + 2:  # both encoders have one
            pass
        encoder.kill()
        encoder.start()
    answers = [future.result() for future in futures]
    if fault == "stall":
        os.kill(encoder.process.pid, signal.SIGCONT)
    return answers


def run(scale: float) -> Outcome:
    rng = random.Random(0)
    herd, rounds = max(20, round(HERD * scale)), max(len(FAULTS), round(ROUNDS * scale))
    shared = sorted(os.listdir("/dev/shm"))
    counts: Counter[str] = Counter()
    with ExitStack() as ends:
        encoders = [Encoder(), Encoder()]
        for encoder in encoders:
            ends.callback(encoder.stop)
        addresses = ",".join(encoder.process.address for encoder in encoders)
        port = free_port()
        role = [
            "--role",
            "decoder",
            "--encoders",
            addresses,
            "--encoder-lease",
            str(LEASE),
            "--metrics-port",
            str(port),
        ]
        server = ends.enter_context(ServerProcess([*COMMON, *role, "--max-queue", str(2 * herd)]))
        whole = ends.enter_context(ServerProcess(COMMON))
        apart = ends.enter_context(saccade.Client(server.address, max_retries=20))
        plain = ends.enter_context(saccade.Client(whole.address))
        pool = ends.enter_context(ThreadPoolExecutor(max(herd, CROWD)))

        warmed = metrics(port)["saccade_encoder_given_total"]
        answers = {tuple(tokens) for tokens in pool.map(lambda _: ask(apart, 1), range(herd))}
        given = metrics(port)["saccade_encoder_given_total"] - warmed
        counts["herd_encodings"] = int(given)
        if answers != {tuple(ask(plain, 1))} or given != 1:
            return Outcome(False, {"error": f"{herd} requests: {len(answers)} answers, {given:g} encodings"})
        print(f"  {herd} requests for one image: encoded once", file=sys.stderr, flush=True)

        for number in range(rounds):
            fault = FAULTS[number % len(FAULTS)]
            got = one_round(number, fault, encoders[0] if fault == "stall" else rng.choice(encoders), pool, apart, port)
            counts[fault] += 1
            expected = [ask(plain, 1000 + number * CROWD + i) for i in range(CROWD)]
            counts["different"] += sum(a != b for a, b in zip(got, expected, strict=True))
            print(f"  round {number + 1} of {rounds}, {fault}", file=sys.stderr, flush=True)

        left = settle(port)
        for encoder in encoders:
            left += settle(encoder.metrics_port)
        seen = metrics(port)
        for name in ("lost", "late", "written", "cancelled"):
            counts[name] = int(seen[f"saccade_encoder_{name}_total"])
        counts["failures"] = int(seen["saccade_handoff_failures_total"])
    counts["segments_left"] = len(set(os.listdir("/dev/shm")) - set(shared))
    passed = not counts["different"] and not left and not counts["segments_left"]
    return Outcome(passed, {"herd": herd, "rounds": rounds, **counts, "left": left})


def settle(port: int, tries: int = 600) -> list[str]:
    """Waits until a server holds nothing but its cache. Returns what it still holds in the end."""
    left: list[str] = []
    for _ in range(tries):
        seen = metrics(port)
        part = "saccade_handoff_"
        held = {name: seen[part + name] for name in ("leases", "writing", "reserved", "waiting", "quarantined")}
        left = [f"{name} {value:g}" for name, value in held.items() if value]
        if seen[part + "used_bytes"] != seen[part + "cached_bytes"]:
            left.append(f"used {seen[part + 'used_bytes']:g}, cached {seen[part + 'cached_bytes']:g}")
        if not left:
            break
    return left
