"""Share of a decode step that scheduling and bookkeeping take, with the 116 M model in bfloat16 in this process.

    python -m benchmarks.bookkeeping [--requests 32,128,512] [--steps 12] [--write]

All requests decode together. Bookkeeping is what the scheduler, the commitment of a step's memory and the handling of
its tokens take; the rest of a step builds its batch, runs the layers and draws tokens. Target: at most `MOST` of each
step. Returns 1 otherwise. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import machine
from benchmarks.models import text_model
from benchmarks.record import add_options, write_result
from decoder.config import DecoderOptions
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from service.model.checkpoint import Checkpoint

MOST = 0.03
PROMPT = 4
WARM = 3
"""Steps after the prompts that are not counted."""


class Clock:
    """Seconds within some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added to `seconds`."""

        def run(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

        return run


def measure(checkpoint: Checkpoint, requests: int, steps: int) -> dict[str, float]:
    """Medians over `steps` steps with one token for each request."""
    options = DecoderOptions(
        dtype=torch.bfloat16, max_seqs=requests, max_len=64, max_batched_tokens=max(512, PROMPT * requests),
        state_cache="none",
    )  # fmt: skip
    runner, clock = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights()), Clock()
    loop: Any = runner.loop
    loop.scheduler.schedule = clock.timed(loop.scheduler.schedule)
    loop.states.commit = clock.timed(loop.states.commit)
    loop.answers.read, loop.answers.finish = clock.timed(loop.answers.read), clock.timed(loop.answers.finish)
    params = SamplingParams(max_tokens=steps + 2 * WARM + 8, temperature=0, ignore_eos=True)
    for number in range(requests):
        runner.add(DecoderRequest(f"r{number}", [5 + number % 97] * PROMPT, params))
    if all(len(runner.step()) < requests for _ in range(WARM)):
        raise RuntimeError(f"after {WARM} steps the prompts of {requests} requests are not all computed")
    whole, kept = [], []
    for _ in range(WARM + steps):
        clock.seconds, started = 0.0, time.perf_counter()
        assert len(runner.step()) == requests
        whole.append(time.perf_counter() - started)
        kept.append(clock.seconds)
    runner.close()
    step, bookkeeping = (statistics.median(times[WARM:]) for times in (whole, kept))
    return {
        "requests": requests,
        "step_ms": 1e3 * step,
        "bookkeeping_ms": 1e3 * bookkeeping,
        "share": bookkeeping / step,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="32,128,512", help="numbers of requests")
    parser.add_argument("--steps", type=int, default=12)
    add_options(parser)
    arguments = parser.parse_args(argv)
    before, checkpoint = machine.before(), Checkpoint(text_model(arguments.folder))
    rows = []
    for count in arguments.requests.split(","):
        rows.append(row := measure(checkpoint, int(count), arguments.steps))
        print(f"{row['requests']:5} requests: step {row['step_ms']:8.2f} ms, bookkeeping {row['bookkeeping_ms']:6.3f} "
              f"ms, {row['share']:.2%}", flush=True)  # fmt: skip
    result = {
        **machine.header("bookkeeping", argv, before),
        "rows": rows,
    }
    if arguments.write:
        write_result("bookkeeping", result)
    print(json.dumps(result))
    return 0 if all(row["share"] <= MOST for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
