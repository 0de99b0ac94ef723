"""`saccade plan --replicas`: how many replicas a load needs, and what saturates first as their number grows.

A simulation of queues. A replica answers `slots` requests at a time, each in `seconds`, as measured with that many in
flight (by the metric saccade_generation_seconds, or by `benchmarks.serve`). Requests arrive at random times. The key of
a request is its image or system prompt; `skew` sets how popular each key is. Without affinity, requests go to the
replicas in turn; with affinity, all requests with the same key go to the same replica.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import math
import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from service.commands.plan import Table, size
from service.common.config import ConfigError

SIZES = (1, 3, 10, 30, 100, 300, 1000)
MOST = 1000
"""The largest number of replicas that is considered."""
RANGES = {
    "rate": (1e-9, 1e15), "seconds": (1e-6, 1e6), "slots": (1, 2**16), "wait": (1e-6, 1e9), "tokens": (1e-6, 1e9),
    "request_bytes": (1, 1e12), "keys": (1, 10**6), "skew": (0, 4), "network": (1, 1e15), "frontend_tokens": (1, 1e12),
}  # fmt: skip
"""Allowed values of a load's fields. With other values a simulation might not end, or not fit into memory."""
REQUESTS_EACH = 400
"""Simulated requests for each batch slot, up to MOST_REQUESTS in total."""
MOST_REQUESTS = 200_000
FRONTEND_TOKENS = 79_000.0
"""Tokens/s that one frontend process streams, measured by `benchmarks.serve --only ceiling` on two cores."""
ROUTER_SECONDS = 0.005
"""Processor time that Ray Serve's proxy takes for a request, as its users report; Envoy takes a tenth of it."""


@dataclass(frozen=True)
class Load:
    """What clients ask for, and what one replica does."""

    rate: float
    """Requests per second, of all clients."""
    seconds: float
    """Seconds for one answer, in a replica with all slots in use."""
    slots: int = 32
    """Requests that a replica answers at a time."""
    wait: float = 1.0
    """Seconds that 99 of 100 requests may wait at most."""
    tokens: float = 100.0
    """Tokens of an answer."""
    request_bytes: float = 200_000.0
    """Bytes of a request, images included."""
    keys: int = 10_000
    """Different images or system prompts that are in use at a time."""
    skew: float = 0.8
    """The n-th key is asked for n^-skew times as often as the first."""
    network: float = 1.25e9
    """Bytes/s of a machine's network."""
    frontend_tokens: float = FRONTEND_TOKENS
    """Tokens/s that one frontend process streams."""

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise ConfigError(f"{name.replace('_', '-')}: expected a number from {least} to {most}, got {value}")

    @property
    def of_one(self) -> float:
        """Requests per second that one replica answers if its slots are always in use."""
        return self.slots / self.seconds


@dataclass(frozen=True)
class Waits:
    """Result of a simulation: the median and the 99th percentile of the waits for a batch slot, in seconds, and the
    share of time that the slots of the busiest replica are in use."""

    median: float
    p99: float
    busiest: float


def simulate(load: Load, replicas: int, *, affinity: bool, seed: int = 0) -> Waits:
    """Simulates the waits for a batch slot. Service times are exponentially distributed, which is pessimistic, because
    the length of answers is limited."""
    drawn = random.Random(seed)
    count = min(MOST_REQUESTS, REQUESTS_EACH * load.slots * replicas)
    weights = list(accumulate((n + 1) ** -load.skew for n in range(load.keys)))
    home = [_home(key, replicas) for key in range(load.keys)] if affinity else []
    free = [[0.0] * load.slots for _ in range(replicas)]
    worked = [0.0] * replicas
    waits, now = [], 0.0
    for number in range(count):
        now += drawn.expovariate(load.rate)
        chosen = home[bisect(weights, drawn.random() * weights[-1])] if affinity else number % replicas
        begins = max(now, free[chosen][0])
        takes = drawn.expovariate(1 / load.seconds)
        heapq.heapreplace(free[chosen], begins + takes)
        worked[chosen] += takes
        waits.append(begins - now)
    waits = sorted(waits[len(waits) // 5 :])  # without the first fifth, because all slots are free at first
    return Waits(
        waits[len(waits) // 2], waits[min(len(waits) - 1, int(0.99 * len(waits)))], max(worked) / (now * load.slots)
    )


def _home(key: int, replicas: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d" % key, digest_size=8).digest(), "little") % replicas


def needed(load: Load, *, affinity: bool) -> int | None:
    """The smallest number of replicas for which 99 of 100 requests wait no longer than `load.wait`; None if it is more
    than `MOST`."""

    def enough(replicas: int) -> bool:
        return simulate(load, replicas, affinity=affinity).p99 <= load.wait

    return _smallest(max(1, math.ceil(load.rate / load.of_one)), enough)


def _smallest(low: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest number from `low` to `MOST` for which `enough` is true; None if there is none."""
    high = low
    while high <= MOST and not enough(high):
        low, high = high + 1, max(high + 1, math.ceil(high * 1.3))
    if high > MOST and (low > MOST or not enough(high := MOST)):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high


def held(load: Load, replicas: int, *, affinity: bool) -> float:
    """The highest rate, in requests per second and to within 2 % of the full rate, at which 99 of 100 requests wait no
    longer than `load.wait`."""
    low, high = 0.0, 1.0
    while high - low > 0.02:
        middle = (low + high) / 2
        rate = middle * replicas * load.of_one
        fine = simulate(replace(load, rate=rate), replicas, affinity=affinity).p99 <= load.wait
        low, high = (middle, high) if fine else (low, middle)
    return low * replicas * load.of_one


def needed_table(load: Load) -> Table:
    rows: list[tuple[str, ...]] = [("policy", "replicas", "median wait", "p99 wait", "busiest replica")]
    for name, affinity in (("round robin", False), ("affinity", True)):
        count = needed(load, affinity=affinity)
        if count is None:
            rows.append((name, f"more than {MOST}", "", "", ""))
            continue
        waits = simulate(load, count, affinity=affinity)
        rows.append((name, str(count), f"{waits.median:.2f} s", f"{waits.p99:.2f} s", f"{waits.busiest:.0%}"))
    return Table(f"{load.rate:g} requests/s, {load.slots} at a time in a replica, {load.seconds:g} s each", rows)


def growth_table(load: Load, sizes: Sequence[int] = SIZES) -> Table:
    """The rates that each number of replicas sustains, and the resulting load on frontends, networks and routers, in
    percent of what one of each can do: it would be saturated at more than 100 %."""
    rows: list[tuple[str, ...]] = [
        ("replicas", "round robin", "affinity", "frontend", "replica's network", "router's network", "Serve proxies")
    ]
    for count in sizes:
        turns, sticky = (held(load, count, affinity=affinity) for affinity in (False, True))
        frontend = turns / count * load.tokens / load.frontend_tokens
        network = turns / count * load.request_bytes / load.network
        router = turns * load.request_bytes / load.network
        proxies = math.ceil(turns * ROUTER_SECONDS)
        rows.append(
            (
                str(count),
                f"{turns:.0f}/s",
                f"{sticky:.0f}/s",
                f"{frontend:.1%}",
                f"{network:.1%}",
                f"{router:.1%}",
                str(proxies),
            )  # fmt: skip
        )
    return Table(f"rates with waits of up to {load.wait:g} s, requests of {size(int(load.request_bytes))}", rows)


def main(argv: Sequence[str]) -> int:
    """Prints both tables. Raises ConfigError."""
    parser = argparse.ArgumentParser("saccade plan --replicas", description=__doc__)
    parser.add_argument("--rate", type=float, required=True, help="requests per second from all clients")
    parser.add_argument(
        "--seconds", type=float, required=True, help="seconds for one answer, in a replica with all slots in use"
    )
    parser.add_argument("--slots", type=int, default=32, help="requests that a replica answers at a time (default: 32)")
    parser.add_argument("--wait", type=float, default=1.0, help="seconds that 99 of 100 requests may wait (default: 1)")
    parser.add_argument("--tokens", type=float, default=100.0, help="tokens of an answer (default: 100)")
    parser.add_argument(
        "--request-bytes", type=float, default=200_000.0, help="bytes of a request, images included (default: 200000)"
    )
    parser.add_argument(
        "--keys", type=int, default=10_000,
        help="different images or system prompts that are in use at a time (default: 10000)",
    )  # fmt: skip
    parser.add_argument(
        "--skew", type=float, default=0.8,
        help="the n-th key is requested n^-skew times as often as the first; 0: all equally (default: 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--network", type=float, default=1.25e9, help="bytes/s of a machine's network (default: 1.25e9)"
    )
    parser.add_argument(
        "--frontend-tokens", type=float, default=FRONTEND_TOKENS,
        help="tokens/s that a frontend process streams (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES)),
        help="numbers of replicas in the second table, separated by commas (default: %(default)s)",
    )  # fmt: skip
    options = vars(parser.parse_args(argv))
    sizes = options.pop("sizes")
    if not all(part.isdecimal() and 1 <= int(part) <= MOST for part in sizes.split(",")):
        raise ConfigError(f"sizes: expected numbers from 1 to {MOST}, separated by commas, got {sizes!r}")
    load = Load(**options)
    print(f"{needed_table(load)}\n\n{growth_table(load, [int(part) for part in sizes.split(',')])}")
    return 0
