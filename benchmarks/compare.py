"""Comparison with another server on the same checkpoint and the same requests.

    python -m benchmarks.compare [--family nemotron_h|qwen3_5|lfm2_vl] --peer transformers|vllm|llamacpp [--rounds 3]
                                 [--only decode,prefill,omni] [--weights int8] [--activations int8] [--device cuda]
                                 [--concurrent 1,8,64] [--new-tokens 64] [--instruction-set avx2|avx512vnni|avx512]
                                 [--shape 116m|600m|1500m|moe] [--prompt 1024] [--label intel] [--stream]

Saccade runs behind its gRPC server, the peer in a process of its own. In each round both sides run each workload in
turn, short ones several times. The output has the medians of each side and, because the host's speed changes from
round to round, the median, smallest and largest ratio of a round. Both sides send whole answers. With `--stream`,
Saccade streams its answers token by token, which takes time of client and server on the same cores; the result then
has times to first tokens.
The machine's limits are measured before, between and after both sides' runs of a workload in each round, because the
memory bandwidth of a shared host changes from second to second (two virtual processors read up to twice as fast while
the host runs them on different core complexes). The lower bound of a run is computed from the means of the limits
before and after it and from the checkpoint's shapes (benchmarks/floors.py). The prompts of a decode workload are also
run alone; the difference is the time of decoding.
Run it on an idle machine. `--only` and `--concurrent` select parts. With `--weights`, llama.cpp uses the type with as
many bits (`PEER_WEIGHTS`), and other peers use bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import machine, models, plot, sized_models
from benchmarks.floors import Floor, Machine
from benchmarks.record import FOLDER, write_result
from benchmarks.sides import SETTLE, TURN, Ours, Peer, Timed, turn
from benchmarks.workloads import SUBJECTS, Workload, sized, workloads
from decoder.config import ACTIVATION_KINDS, WEIGHT_KINDS, DecoderConfig
from service.model.resolve import DEFAULT_MAX_LEN

Ceilings = dict[str, float]
"""What `machine.ceilings` measured."""

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "avx2": {"PEER_INSTRUCTION_SET": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512vnni": {"PEER_INSTRUCTION_SET": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512": {"PEER_INSTRUCTION_SET": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
"""For each of Saccade's instruction sets, the environment that limits vLLM and its libraries to the same. llama.cpp
has a build for each."""
PEER_WEIGHTS = {None: "bf16", "int8": "q8_0", "int8-32": "q8_0", "int4": "q4_0", "int4-32": "q4_0"}
"""Saccade's kind of weights -> llama.cpp's type with as many bits. Both quantised types of llama.cpp have one scale per
32 numbers; Saccade's int8-32 and int4-32 too, but int4 has one per 128 numbers and int8 one per row. llama.cpp
multiplies them with int8 activations that have one scale per 32 numbers; Saccade's activations have 16 bits or, with
`--activations int8`, 8 bits and one scale per row."""


@dataclass(frozen=True)
class Sides:
    """What is compared: the peer's name, further options of Saccade's server, and the folder of the peer's logs."""

    peer: str
    options: tuple[str, ...]
    logs: Path
    device: str = "cpu"
    most: int = 32
    """Maximum number of concurrent requests."""
    peer_weights: str = "bf16"
    """llama.cpp: type of its weights."""
    stream: bool = False
    """Whether Saccade's server streams its answers."""


def typical(measured: Sequence[Ceilings]) -> Ceilings:
    """The median of each number."""
    return {name: statistics.median(each[name] for each in measured) for name in measured[0]}


def between(before: Ceilings, after: Ceilings) -> Machine:
    """The machine during runs: the means of its limits before and after them."""
    return Machine.of({name: (before[name] + after[name]) / 2 for name in before})


@dataclass
class Measured:
    """The rounds of one workload."""

    load: Workload
    runs: list[list[tuple[Timed, Timed]]] = field(default_factory=list)
    """For each round: runs of Saccade's server and of the peer, in pairs."""
    prompts: list[tuple[float, float]] = field(default_factory=list)
    """For each round: seconds of the prompts alone, Saccade's and the peer's. Empty for workloads without a decode
    part."""
    ceilings: list[tuple[Ceilings, Ceilings, Ceilings]] = field(default_factory=list)
    """For each round: the machine's limits before, between and after both sides' runs."""

    def add_round(self, ours: Ours, peer: Peer, times: int, device: str) -> None:
        """Runs the workload `times` times on each side, then its prompts alone once."""
        before = settled_ceilings(device)
        mine = turn(ours, self.load, times)
        middle = settled_ceilings(device)
        theirs = turn(peer, self.load, times)
        self.ceilings.append((before, middle, settled_ceilings(device)))
        self.runs.append(list(zip(mine, theirs, strict=True)))
        if self.load.new_tokens > 1 and not self.load.sizes:
            alone = replace(self.load, new_tokens=1)
            mine, theirs = (turn(side, alone, 1) for side in (ours, peer))
            self.prompts.append((mine[0].seconds, theirs[0].seconds))

    def row(self, floor: Floor, memory: tuple[int, int]) -> dict[str, Any]:
        """The result. `memory`: peak bytes of both sides."""
        load = self.load
        runs = [run for each in self.runs for run in each]
        mine, theirs = medians(runs)
        rounds = [dict(zip(("ours_s", "peer_s"), medians(each), strict=True)) for each in self.runs]
        ratios = [each["peer_s"] / each["ours_s"] for each in rounds]
        counted = load.prompt_tokens if load.new_tokens == 1 else load.output_tokens
        row: dict[str, Any] = {
            "workload": load.name,
            "ours_s": mine,
            **percentiles("ours", [first for ours, _ in runs for first in ours.firsts]),
            **percentiles("peer", [first for _, peer in runs for first in peer.firsts]),
            "peer_s": theirs,
            "ours_tokens_s": counted / mine,
            "peer_tokens_s": counted / theirs,
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "rounds": rounds,
            "ours_peak_bytes": memory[0],
            "peer_peak_bytes": memory[1],
            "ceilings": typical([each for three in self.ceilings for each in three]),
        }
        for i, (side, prefix) in enumerate((("ours", ""), ("peer", "peer_"))):
            machines = [between(*three[i : i + 2]) for three in self.ceilings]
            seconds = [each[f"{side}_s"] for each in rounds]
            row[f"{prefix}floor_fraction"] = roofline_share(partial(load.floor, floor), machines, seconds)
            if self.prompts:
                row |= decoding(load, floor, side, machines, seconds, [each[i] for each in self.prompts])
        return row


def settled_ceilings(device: str) -> Ceilings:
    """The machine's limits, once the threads of both sides are idle."""
    time.sleep(SETTLE)
    return machine.ceilings(device)


def seconds_of(run: tuple[Timed, Timed]) -> tuple[float, float]:
    return run[0].seconds, run[1].seconds


def medians(runs: Sequence[tuple[Timed, Timed]]) -> list[float]:
    """Median seconds of both sides."""
    return [statistics.median(seconds) for seconds in zip(*map(seconds_of, runs), strict=True)]


def measure(sides: Sides, side_by_side: list[tuple[Path, bool, list[Workload]]], rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model, omni, loads in side_by_side:
        if not loads:
            continue
        floor = Floor.of(model)
        tokens = max(load.longest for load in loads)
        ours = Ours(model, (*sides.options, *length_options(floor.decoder, tokens)), sides.most, stream=sides.stream)
        try:
            log = sides.logs / f"{sides.peer}{'-omni' if omni else ''}.log"
            peer = Peer(sides.peer, model, omni, log, sides.device, sides.peer_weights, tokens)
        except BaseException:
            ours.close()
            raise
        try:
            measured = [Measured(load) for load in loads]
            repeats = [repeats_of(load, ours, peer) for load in loads]
            for _ in range(rounds):
                for each, times in zip(measured, repeats, strict=True):
                    each.add_round(ours, peer, times, sides.device)
            memory = ours.peak_bytes(), peer.peak_bytes
        finally:
            ours.close()
            peer.close()
        for each in measured:
            rows.append(each.row(floor, memory))
            print(format_row(rows[-1]), flush=True)
    return rows


def length_options(config: DecoderConfig, tokens: int) -> tuple[str, ...]:
    """The options of Saccade's server for prompts and answers of so many tokens together. `SystemExit` if the
    checkpoint has fewer positions and uses them."""
    if tokens > config.max_position_embeddings and config.position_axes:
        there = config.max_position_embeddings
        raise SystemExit(f"--prompt: a prompt and its answer have {tokens} tokens, the checkpoint {there} positions")
    return ("--max-len", str(tokens)) if tokens > min(config.max_position_embeddings, DEFAULT_MAX_LEN) else ()


def repeats_of(load: Workload, ours: Ours, peer: Peer) -> int:
    """How often to run a workload for a turn of `TURN` seconds. Runs it once on each side, which warms both up."""
    return max(1, round(TURN / min(ours.run(load).seconds, peer.run(load).seconds)))


def roofline_share(
    least: Callable[[Machine], float | None], machines: Sequence[Machine], seconds: Sequence[float]
) -> float | None:
    """Median over rounds of the lower bound on the machine as it was in that round, as a share of the seconds measured.
    None if a bound is not known."""
    shares = [bound / took for bound, took in zip(map(least, machines), seconds, strict=True) if bound is not None]
    return statistics.median(shares) if shares else None


def decoding(
    load: Workload,
    floor: Floor,
    side: str,
    machines: Sequence[Machine],
    seconds: Sequence[float],
    prompts: Sequence[float],
) -> dict[str, float | None]:
    """A side's decode part of a workload. `seconds`: of the workload in each round; `prompts`: of its prompts alone,
    the median of which is subtracted. Empty if the prompts took as long."""
    alone = statistics.median(prompts)
    left = [whole - alone for whole in seconds]
    if min(left) <= 0:
        return {}
    requests, steps = len(load.prompts), load.new_tokens - 1
    share = roofline_share(lambda machine: steps * floor.step(machine, requests), machines, left)
    return {
        f"{side}_decode_tokens_s": requests * steps / statistics.median(left),
        f"{side}_decode_floor_fraction": share,
    }


def percentiles(side: str, firsts: Sequence[float]) -> dict[str, float]:
    """Percentiles of the seconds to the first token, over all requests and rounds; empty if a side does not report
    them."""
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{side}_first_token_{n}_s": machine.percentile(firsts, share) for n, share in shares.items() if firsts}


def format_row(row: dict[str, Any]) -> str:
    floor = ""
    if row["floor_fraction"]:
        floor = f"of the roofline {row['floor_fraction']:4.0%} and {row['peer_floor_fraction']:4.0%}   "
    decode = " and ".join(
        f"{row[f'{side}_decode_tokens_s']:.0f} tok/s ({row[f'{side}_decode_floor_fraction']:.0%})"
        for side in ("ours", "peer")
        if f"{side}_decode_tokens_s" in row
    )
    return (
        f"{row['workload']:16} ours {row['ours_tokens_s']:8.0f} tok/s {row['ours_s']:7.3f} s   "
        f"peer {row['peer_tokens_s']:8.0f} tok/s {row['peer_s']:7.3f} s   ratio {row['ratio']:5.2f} "
        f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f})   {floor}"
        f"peak {row['ours_peak_bytes'] / 2**20:5.0f} and {row['peer_peak_bytes'] / 2**20:5.0f} MiB"
        + (f"   decoding alone {decode}" if decode else "")
    )


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(SUBJECTS), default="nemotron_h")
    parser.add_argument("--peer", choices=["transformers", "vllm", "llamacpp"], default="transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="decode,prefill,omni", help="comma-separated kinds of workload")
    parser.add_argument("--weights", choices=WEIGHT_KINDS, help="quantised weights of Saccade")
    parser.add_argument("--activations", choices=ACTIVATION_KINDS, help="quantised activations of Saccade")
    parser.add_argument("--device", default="cpu", help="device of both sides")
    parser.add_argument("--concurrent", default="1,8,32", help="concurrent requests of the decode workloads")
    parser.add_argument("--new-tokens", type=int, default=64, help="output tokens of each concurrent request")
    parser.add_argument(
        "--instruction-set", choices=list(LIMITS), help="limit both sides to this one; not with --peer transformers"
    )
    parser.add_argument(
        "--shape",
        choices=sized_models.SHAPES,
        default=sized_models.SMALLEST,
        help="size of nemotron_h; others: text only",
    )
    parser.add_argument("--stream", action="store_true", help="stream Saccade's answers")
    parser.add_argument("--prompt", type=int, help="tokens of each text prompt, instead of the family's")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--write", action="store_true", help="write a dated result under benchmarks/results")
    parser.add_argument("--label", help="last part of the result's name, such as a processor's: a-z, 0-9 and -")
    return parser


def result_name(arguments: argparse.Namespace) -> str:
    """Name of the result's file without its date. Names only options that differ from the default."""
    family = None if arguments.family == "nemotron_h" else arguments.family
    shape = None if arguments.shape == sized_models.SMALLEST else arguments.shape
    length = arguments.prompt and f"{arguments.prompt}-tokens"
    activations = arguments.activations and f"activations-{arguments.activations}"
    ours = (arguments.weights, activations, arguments.instruction_set)
    streamed = "streamed" if arguments.stream else None
    parts = ("compare", family, arguments.peer, *ours, shape, length, streamed, arguments.label)
    return "-".join(part for part in parts if part)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ends the program if some are incompatible."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if arguments.instruction_set and arguments.peer == "transformers":
        parser.error("--instruction-set: transformers cannot be limited; vllm and llamacpp can")
    if arguments.label is not None and not re.fullmatch(r"[a-z0-9-]+", arguments.label):
        parser.error(f"--label: {arguments.label!r} may contain only a-z, 0-9 and -")
    if arguments.prompt is not None and arguments.prompt < 1:
        parser.error(f"--prompt: {arguments.prompt} is below 1")
    try:
        arguments.subject = sized(arguments.family, arguments.shape)
    except ValueError as error:
        parser.error(str(error))
    if arguments.peer == "llamacpp" and arguments.weights not in PEER_WEIGHTS:
        parser.error(f"--weights {arguments.weights}: llama.cpp has no such type; use int8, int8-32, int4 or int4-32")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parsed(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    subject, only = arguments.subject, set(arguments.only.split(","))
    if arguments.shape != sized_models.SMALLEST:
        only -= {"omni"}
    peer_weights = "bf16"
    if arguments.peer == "llamacpp":
        only -= {"omni"}  # llama.cpp's server needs separate tower files for images
        peer_weights = PEER_WEIGHTS[arguments.weights]
    if arguments.peer == "transformers" and arguments.family == "lfm2_vl":
        only -= {"omni"}  # its image processor needs torchvision
    before = machine.before()
    concurrent = [int(count) for count in arguments.concurrent.split(",")]
    ceilings = machine.ceilings(arguments.device)
    print(json.dumps({**machine.describe(), **ceilings, "load": before.load}))
    with tempfile.TemporaryDirectory() as folder:
        text, omni = workloads(subject, Path(folder), only, concurrent, arguments.new_tokens, arguments.prompt)
        sides = [(subject.text(arguments.folder), False, text)]
        if omni:
            sides.append((subject.omni(arguments.folder), True, omni))
        if arguments.peer == "vllm" and arguments.family == "nemotron_h":
            sides = [
                (models.released_names(path, arguments.folder) if omni else path, omni, l) for path, omni, l in sides
            ]
        options: tuple[str, ...] = ("--device", arguments.device)
        for name in ("weights", "activations", "instruction_set"):
            if given := getattr(arguments, name):
                options = (*options, f"--{name.replace('_', '-')}", given)
        if arguments.instruction_set:
            # The peer inherits it.
            os.environ |= LIMITS[arguments.instruction_set] | {"PEER_BUILD": arguments.instruction_set}
        most = max(32, *concurrent)
        how = Sides(arguments.peer, options, arguments.folder, arguments.device, most, peer_weights, arguments.stream)
        rows = measure(how, sides, arguments.rounds)
    result = {
        **machine.header("compare", argv, before),
        "peer_weights": peer_weights,
        "ceilings": ceilings,
        "rows": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.write:
        path = write_result(result_name(arguments), result)
        plot.decode_plot(result, arguments.peer, path.with_suffix(".png"))
        print(f"written to {path.relative_to(ROOT)} and .png", file=sys.stderr)
    print(json.dumps({row["workload"]: {"ratio": round(row["ratio"], 3)} for row in rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
