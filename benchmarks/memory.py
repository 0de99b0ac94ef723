"""Peak memory by kind of weights, of Saccade's and llama.cpp's servers, under the workloads of benchmarks.compare.

    python -m benchmarks.memory [--kinds bfloat16,int8,int4] [--peers bf16,q8_0,q4_0] [--write]

One server at a time. For Saccade, the sum of the peaks (VmHWM) of all processes, in which pages that two of them share
count twice; for llama.cpp, the peak of its one process. The machine need not be idle.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.record import add_options, write_result
from benchmarks.sides import Ours, Peer
from benchmarks.weights import options_of
from benchmarks.workloads import SUBJECTS, workloads


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(SUBJECTS), default="nemotron_h")
    parser.add_argument("--kinds", default="bfloat16,int8,int4,int4-32", help="as in benchmarks.weights; may be empty")
    parser.add_argument("--peers", default="bf16,q8_0,q4_0", help="llama.cpp's types; may be empty")
    add_options(parser)
    arguments = parser.parse_args(argv)
    subject, found = SUBJECTS[arguments.family], dict[str, int]()
    before = machine.before()
    model = subject.text(arguments.folder)
    with tempfile.TemporaryDirectory() as folder:
        loads, _ = workloads(subject, Path(folder), {"decode", "prefill"}, [1, 8, 32], 64)
        tokens = max(work.longest for work in loads)
        for kind in filter(None, arguments.kinds.split(",")):
            ours = Ours(model, options_of(kind))
            try:
                for work in loads:
                    ours.run(work)
                found[kind] = ours.peak_bytes()
            finally:
                ours.close()
        for kind in filter(None, arguments.peers.split(",")):
            peer = Peer("llamacpp", model, False, Path(folder) / "log", kind=kind, tokens=tokens)
            try:
                for work in loads:
                    peer.run(work)
                found[f"llama.cpp {kind}"] = peer.peak_bytes
            finally:
                peer.close()
    result = {
        **machine.header("memory", argv, before),
        "family": arguments.family,
        "peak_bytes": found,
    }
    print(json.dumps({name: f"{size / 2**20:.0f} MiB" for name, size in found.items()}))
    if arguments.write:
        print(write_result("memory", result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
