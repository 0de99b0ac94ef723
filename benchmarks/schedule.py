"""Cost of the scheduler's Python code per step: 32, 128 and 512 running requests that hold 512 pages each.

    python -m benchmarks.schedule [--requests 32,128,512] [--pages 512] [--steps 64] [--write]

The scheduler alone, without a model. Times are processor times, so that other programs on the machine matter little.
Three situations, each of `--steps` steps in which every request draws one token:

decode    no request waits: the base cost of a step
blocked   one more request waits, for which there is no memory: the cost of checking its admission
reclaim   all memory is in use or cached, so each new superblock of pages needs an eviction

Target: in each situation, the time per request at the largest number of requests is at most `GROWTH` times that at the
smallest. Returns 1 otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import machine
from benchmarks.record import write_result
from decoder.blocks import SuperblockPool
from decoder.checkpoints import Placement
from decoder.config import DecoderOptions
from decoder.prefix_cache import PrefixCache
from decoder.request import DecoderRequest
from decoder.sampling import SamplingParams
from decoder.scheduler import Scheduler

SITUATIONS = ("decode", "blocked", "reclaim")
PAGE, PER_BLOCK, CHUNK = 16, 8, 128
GROWTH = 2.0
"""Maximum ratio of microseconds per request between the largest and the smallest number of requests. It is above 1
because rows are sorted and the data of 512 requests exceeds the processor's caches; work proportional to all pages held
would give a ratio of 16."""


def request(name: str, tokens: int, output: int) -> DecoderRequest:
    """A request with its own cache salt, so that it shares nothing with others."""
    return DecoderRequest(name, [1] * tokens, SamplingParams(max_tokens=output), salt=name.encode())


def advance(scheduler: Scheduler) -> float:
    """One step as the runner does it. Returns the processor seconds of scheduling and committing."""
    started = time.process_time()
    step = scheduler.schedule()
    scheduler.commit(step)
    spent = time.process_time() - started
    for row in step.rows:
        if row.samples:
            row.sequence.tokens.append(1)
    return spent


def running(requests: int, pages: int, steps: int, situation: str) -> Scheduler:
    """A scheduler whose requests have just finished prompts of `pages` pages."""
    tokens = pages * PAGE
    output = 4 * steps
    own = -(-(tokens + output) // (PAGE * PER_BLOCK)) + 1  # and a slot
    blocks = requests * own
    options = DecoderOptions(
        max_seqs=requests + 1, max_len=2 * blocks * PER_BLOCK * PAGE, max_batched_tokens=max(tokens, 2 * requests),
        page_size=PAGE, state_cache="auto",
    )  # fmt: skip
    pool = SuperblockPool(blocks, PER_BLOCK)
    sizes = {"page_bytes": 1 << 16, "slot_bytes": 1 << 20}
    cache = PrefixCache(pool, Placement("auto", CHUNK, CHUNK, PAGE), **sizes)
    scheduler = Scheduler(options, pool, cache=cache, **sizes)
    for number in range(requests):
        scheduler.queues.add(request(f"r{number}", tokens - number % PAGE, output))  # a page more in any step for some
    while any(not sequence.decoding for sequence in scheduler.queues):
        advance(scheduler)
        hold(scheduler)
    cache.clear()
    if situation == "blocked":
        scheduler.queues.add(request("late", blocks * PER_BLOCK * PAGE, 1))
    elif situation == "reclaim":
        fill(scheduler)
    return scheduler


def hold(scheduler: Scheduler) -> None:
    """Resets requests that have drawn more than one token, so that none grows before the timed steps."""
    for sequence in scheduler.running:
        if sequence.output_len:
            del sequence.tokens[sequence.prompt_len + 1 :]
            sequence.computed = len(sequence.tokens) - 1


def fill(scheduler: Scheduler) -> None:
    """Short requests come, leave their pages in the cache and end, until no superblock is free."""
    number = 0
    while scheduler.pool.free_blocks > 2:
        kept = scheduler.queues.add(request(f"cached {number}", CHUNK, 1))
        scheduler.commit(scheduler.schedule())
        scheduler.keep(kept)
        scheduler.finish(kept)
        number += 1
        hold(scheduler)


def measure(requests: int, pages: int, steps: int, situation: str) -> dict[str, Any]:
    scheduler = running(requests, pages, steps, situation)
    assert scheduler.cache is not None
    evicted = scheduler.cache.counters["evicted"]
    gc.collect()
    spent = [advance(scheduler) for _ in range(steps)]
    assert len(scheduler.running) == requests and not scheduler.preemption.preemptions
    return {
        "situation": situation,
        "requests": requests,
        "pages_held": requests * pages,
        "evictions": scheduler.cache.counters["evicted"] - evicted,
        "median_ms": 1e3 * statistics.median(spent),
        "mean_ms": 1e3 * statistics.mean(spent),
        "max_ms": 1e3 * max(spent),
        "median_us_per_request": 1e6 * statistics.median(spent) / requests,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, then one line of JSON. Returns 1 if the time per request grows by more than `GROWTH`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="32,128,512", help="numbers of running requests, ascending")
    parser.add_argument("--pages", type=int, default=512, help="pages per request")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args(argv)
    before = machine.before()
    counts = [int(count) for count in arguments.requests.split(",")]
    lines = [measure(n, arguments.pages, arguments.steps, what) for what in SITUATIONS for n in counts]
    growth = {}
    for what in SITUATIONS:
        each = [line["median_us_per_request"] for line in lines if line["situation"] == what]
        growth[what] = each[-1] / each[0]
    print(f"{'situation':10}{'requests':>9}{'median ms':>11}{'max ms':>8}{'us/request':>12}{'evictions':>11}")
    for line in lines:
        print(
            f"{line['situation']:10}{line['requests']:9}{line['median_ms']:11.3f}{line['max_ms']:8.2f}"
            f"{line['median_us_per_request']:12.2f}{line['evictions']:11}"
        )
    met = {what: value <= GROWTH for what, value in growth.items()}
    result = {
        **machine.header("schedule", argv, before),
        "growth_per_request": growth,
        "met": met,
        "steps": lines,
    }
    if arguments.write:
        write_result("schedule", result)
    print(json.dumps(result))
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
