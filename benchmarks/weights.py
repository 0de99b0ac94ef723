"""Speed by kind of weights: Saccade's server with each kind, in turn, in one run.

    python -m benchmarks.weights [--family nemotron_h|qwen3_5] [--shape 116m|600m|1500m|moe]
                                 [--kinds bfloat16,fp8,nvfp4,int8,int8+int8,int8-32,int4,int4-32]
                                 [--peers q8_0,q4_0] [--concurrent 1,32] [--prompts 1x1024,32x128]
                                 [--new-tokens 64] [--rounds 3] [--write] [--label zen5]

One gRPC server per kind, all started at the beginning; in each round each server runs each workload in turn. The output
has medians and the speedup of each kind over the first one. `int8+int8` are weights and activations in int8. The
prompts of a decode workload are also run alone; its decode rate is computed from the remaining time. `--peers` adds
llama.cpp with these types of the same checkpoint. For all kinds, the result has the share of some prompts whose first
token is the same as with the first kind. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.record import add_options, write_result
from benchmarks.sides import TURN, Ours, Peer, turn
from benchmarks.sized_models import SHAPES, SMALLEST
from benchmarks.workloads import PROMPT, SUBJECTS, Workload, prompt_sizes, sized, text_workload, workloads

KINDS = ("bfloat16", "fp8", "nvfp4", "int8", "int8+int8", "int8-32", "int4", "int4-32")
SAME_PROMPTS = 32
"""Prompts whose first tokens are compared."""


def options_of(kind: str) -> list[str]:
    """The server's options for a kind: `weights` or `weights+activations`."""
    weights, _, activations = kind.partition("+")
    options = [] if weights == "bfloat16" else ["--weights", weights]
    return [*options, "--activations", activations] if activations else options


def row_of(load: Workload, seconds: dict[str, list[float]], alone: dict[str, list[float]]) -> dict[str, Any]:
    """The result of a workload. `alone`: seconds of its prompts, empty if it has no decode part."""
    counted = load.prompt_tokens if load.new_tokens == 1 else load.output_tokens
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rates = {name: counted / each for name, each in medians.items()}
    row: dict[str, Any] = {"workload": load.name, "tokens_s": rates, "speedup": speedups(rates)}
    if load.new_tokens > 1:
        later = load.output_tokens - len(load.prompts)
        rates = {name: later / (each - statistics.median(alone[name])) for name, each in medians.items()}
        row |= {"decode_tokens_s": rates, "decode_speedup": speedups(rates)}
    return row | {"all": seconds, "prompts_alone": alone}


def speedups(rates: dict[str, float]) -> dict[str, float]:
    """Each rate divided by the first one."""
    first = next(iter(rates.values()))
    return {name: rate / first for name, rate in rates.items()}


def lines(row: dict[str, Any]) -> Iterator[str]:
    for part, label in (("", row["workload"]), ("decode_", "  without prompts")):
        if rates := row.get(f"{part}tokens_s"):
            times = row[f"{part}speedup"]
            cells = (f"{name} {rate:8.1f} ({times[name]:.2f}x)" for name, rate in rates.items())
            yield f"{label:18} tokens/s   " + "   ".join(cells)


def agreement(sides: dict[str, Ours | Peer], prompts: list[list[int]]) -> dict[str, float]:
    """For each side, the share of prompts for which it draws the same first token as the first side."""
    found = {name: side.ids(prompts, 1) for name, side in sides.items()}
    first = next(iter(found.values()))
    return {name: sum(map(operator.eq, ids, first)) / len(prompts) for name, ids in found.items()}


def measured(sides: dict[str, Ours | Peer], loads: Sequence[Workload], rounds: int) -> Iterator[dict[str, Any]]:
    """The results of workloads, in rounds in which the sides take turns."""
    for load in loads:
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        alone: dict[str, list[float]] = {name: [] for name in sides}
        times = max(1, round(TURN / min(side.run(load).seconds for side in sides.values())))
        for _ in range(rounds):
            for name, side in sides.items():
                seconds[name] += [timed.seconds for timed in turn(side, load, times)]
                if load.new_tokens > 1:
                    prompts = turn(side, replace(load, new_tokens=1), times)
                    alone[name] += [timed.seconds for timed in prompts]
        yield row_of(load, seconds, alone)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--family", choices=list(SUBJECTS), default="nemotron_h")
    found.add_argument("--shape", choices=SHAPES, default=SMALLEST, help="size of nemotron_h")
    found.add_argument(
        "--kinds", default=",".join(KINDS), help="comma-separated; the others are compared with the first"
    )
    found.add_argument("--peers", default="", help="llama.cpp's types, comma-separated")
    found.add_argument("--concurrent", default="1,32", help="concurrent requests")
    found.add_argument("--only", default="decode,prefill", help="comma-separated kinds of workload")
    found.add_argument("--new-tokens", type=int, default=64, help="output tokens of each concurrent request")
    found.add_argument("--prompts", type=prompt_sizes, help="comma-separated numbers of prompts x tokens of each")
    found.add_argument("--rounds", type=int, default=3)
    add_options(found)
    found.add_argument("--label", help="last part of the result's name, such as a processor's")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    command_line = parser()
    arguments = command_line.parse_args(argv)
    try:
        subject = sized(arguments.family, arguments.shape)
    except ValueError as error:
        command_line.error(str(error))
    concurrent = [int(count) for count in arguments.concurrent.split(",")]
    subject = replace(subject, prompts=arguments.prompts or subject.prompts)
    model, before = subject.text(arguments.folder), machine.before()
    ceilings = machine.ceilings()
    sides: dict[str, Ours | Peer] = {}
    with tempfile.TemporaryDirectory() as scratch:
        only = set(arguments.only.split(","))
        loads, _ = workloads(subject, Path(scratch), only, concurrent, arguments.new_tokens)
        try:
            for kind in arguments.kinds.split(","):
                sides[kind] = Ours(model, options_of(kind), max(concurrent))
            tokens = max(PROMPT + 1, *(work.longest for work in loads))  # those of `agreement` have `PROMPT` tokens
            for kind in filter(None, arguments.peers.split(",")):
                log = Path(scratch) / f"{kind}.log"
                sides[f"llama.cpp {kind}"] = Peer("llamacpp", model, False, log, kind=kind, tokens=tokens)
            rows = []
            for row in measured(sides, loads, arguments.rounds):
                rows.append(row)
                for line in lines(row):
                    print(line, flush=True)
            same = agreement(sides, text_workload(subject, "first tokens", SAME_PROMPTS, PROMPT, 1).prompts)
            print("first tokens     " + "   ".join(f"{name} {share:.0%} the same" for name, share in same.items()))
            memory = {name: side.peak_bytes() for name, side in sides.items() if isinstance(side, Ours)}
        finally:
            for side in sides.values():
                side.close()
    print("peak memory      " + "   ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory.items()))
    result = {
        **machine.header("weights", argv, before),
        "ceilings": ceilings,
        "model": model.name,
        "rows": rows,
        "peak": memory,
        "same_first_tokens": same,
    }
    if arguments.write:
        shape = "" if arguments.shape == SMALLEST else arguments.shape
        activations = "activations" if "+" in arguments.kinds else ""
        parts = "weights", arguments.family, activations, shape, arguments.label
        print(f"written to {write_result('-'.join(filter(None, parts)), result)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
