"""Speed by kind of weights: our server with each of them, in turn, in one run.

    python -m benchmarks.weights [--family nemotron_h|qwen3_5] [--kinds bfloat16,fp8,nvfp4,int8,int4]
                                 [--peers q8_0,q4_0] [--concurrent 1,32] [--new-tokens 64] [--rounds 3] [--write]

One gRPC server per kind, all started at the beginning; in each round each runs each workload in turn. The output is
medians, and the speedup of each kind over bfloat16. `--peers` adds llama.cpp's types of the same checkpoint. Run it on
an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.compare import RESULTS, TURN, Ours, Peer, turn
from benchmarks.workloads import SUBJECTS, workloads

KINDS = ("bfloat16", "fp8", "nvfp4", "int8", "int4")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(SUBJECTS), default="nemotron_h")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="comma-separated; the others are compared with the first"
    )
    parser.add_argument("--peers", default="", help="llama.cpp's types, comma-separated")
    parser.add_argument("--concurrent", default="1,32", help="concurrent requests")
    parser.add_argument("--only", default="decode,prefill", help="comma-separated kinds of workload")
    parser.add_argument("--new-tokens", type=int, default=64, help="output tokens of each concurrent request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/saccade/benchmarks").expanduser())
    parser.add_argument("--write", action="store_true", help="write a dated result under benchmarks/results")
    arguments = parser.parse_args(argv)
    subject, concurrent = SUBJECTS[arguments.family], [int(count) for count in arguments.concurrent.split(",")]
    model, ceilings = subject.text(arguments.folder), machine.ceilings()
    sides: dict[str, Ours | Peer] = {}
    with tempfile.TemporaryDirectory() as scratch:
        loads, _ = workloads(
            subject, Path(scratch), set(arguments.only.split(",")), concurrent, arguments.new_tokens
        )  # fmt: skip
        try:
            for kind in arguments.kinds.split(","):
                options = [] if kind == "bfloat16" else ["--weights", kind]
                sides[kind] = Ours(model, options, max(concurrent))
            for kind in filter(None, arguments.peers.split(",")):
                sides[f"llama.cpp {kind}"] = Peer(
                    "llamacpp", model, False, Path(scratch) / f"{kind}.log", kind=kind
                )  # fmt: skip
            rows = []
            for load in loads:
                seconds: dict[str, list[float]] = {name: [] for name in sides}
                times = max(1, round(TURN / min(side.run(load).seconds for side in sides.values())))
                for _ in range(arguments.rounds):
                    for name, side in sides.items():
                        seconds[name] += [timed.seconds for timed in turn(side, load, times)]
                counted = load.prompt_tokens if load.new_tokens == 1 else load.output_tokens
                medians = {name: statistics.median(each) for name, each in seconds.items()}
                first = next(iter(medians.values()))
                rates = {name: counted / median for name, median in medians.items()}
                rows.append({"workload": load.name, "tokens_s": rates, "all": seconds})
                cells = (f"{name} {rate:8.1f} ({first / medians[name]:.2f}x)" for name, rate in rates.items())
                print(f"{load.name:16} tokens/s   " + "   ".join(cells), flush=True)
            memory = {name: side.peak_bytes() for name, side in sides.items() if isinstance(side, Ours)}
        finally:
            for side in sides.values():
                side.close()
    print("peak memory      " + "   ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in memory.items()))
    result = {"machine": machine.describe(), "ceilings": ceilings, "model": str(model), "rows": rows, "peak": memory}
    if arguments.write:
        file = RESULTS / f"{datetime.date.today()}-weights-{arguments.family}.json"
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
