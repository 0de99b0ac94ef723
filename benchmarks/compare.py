"""Comparison with another server on the same checkpoint and the same requests.

    python -m benchmarks.compare [--family nemotron_h|qwen3_5] --peer transformers|vllm|llamacpp [--rounds 3]
                                 [--only decode,prefill,omni] [--weights int8] [--device cuda] [--concurrent 1,8,64]
                                 [--new-tokens 64] [--instruction-set avx2|avx512vnni|avx512]
                                 [--shape 116m|600m|1500m|moe] [--prompt 1024] [--label intel]

Saccade runs behind its gRPC server, the peer in a process of its own. In each round both sides run each workload in
turn, short ones several times; the output is medians and their ratios. The machine's limits are measured with each
workload in each round, because the memory bandwidth of a shared host changes with time; the lower bound of a workload
is computed from their medians and the checkpoint's shapes (benchmarks/floors.py). The prompts of a decode workload are
also run alone; the difference is the time of decoding. Run it on an idle machine. `--only` and `--concurrent` select
parts. With `--weights`, llama.cpp has the type of as many bits (`PEER_WEIGHTS`), other peers have bfloat16.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import saccade
from benchmarks import gguf_model, machine, models, plot, sized_models
from benchmarks.floors import Floor, Machine
from benchmarks.record import write_result
from benchmarks.workloads import SUBJECTS, Workload, workloads
from decoder.config import WEIGHT_KINDS
from service.commands.cli import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
TURN = 1.0
"""Minimum seconds of a side's turn; a single run of some hundredths of a second would be too noisy."""
LIMITS = {
    "avx2": {"PEER_INSTRUCTION_SET": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512vnni": {"PEER_INSTRUCTION_SET": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512": {"PEER_INSTRUCTION_SET": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
"""For each of our instruction sets, the environment that limits the peer and its libraries to the same."""
PEER_WEIGHTS = {None: "bf16", "int8": "q8_0", "int4": "q4_0", "int4-32": "q4_0"}
"""llama.cpp's type with as many bits as our weights. Both of its quantised types have a scale for 32 numbers: of ours,
int4-32 is as fine, int4 has a scale for 128 and int8 one for a row."""
SETTLE = 0.5
"""Seconds before each turn, because OpenMP threads of the other side spin for a while after their work."""


class Timed(NamedTuple):
    """Of one run of a workload: its seconds, and the seconds from its start to each request's first token."""

    seconds: float
    firsts: list[float]


class Ours:
    """Our server behind gRPC, one client thread per request."""

    def __init__(self, model: Path, options: Sequence[str] = (), most: int = 32) -> None:
        # Rounds repeat their prompts, and the peer forgets them: so does our server.
        fixed = ["--dtype", "bfloat16", "--max-seqs", str(most), "--state-cache", "none", "--log-level", "warning"]
        options = [*fixed, *options]
        self._server = ServerProcess([str(model), *options])
        self._client = saccade.Client(self._server.address)
        self._pool = ThreadPoolExecutor(most)

    def run(self, workload: Workload) -> Timed:
        started = time.perf_counter()

        def ask(index: int) -> float:
            first = 0.0
            # Other bytes behind the image, which decoders ignore, make it another image to the embedding cache.
            images = [file.read_bytes() + os.urandom(8) for file in workload.images[index]]
            with self._client.stream(
                workload.prompts[index], images=images, max_tokens=workload.new_tokens, temperature=0, ignore_eos=True
            ) as stream:
                for _ in stream:
                    first = first or time.perf_counter() - started
                assert len(stream.final().token_ids) == workload.new_tokens
            return first

        firsts = list(self._pool.map(ask, range(len(workload.prompts))))
        return Timed(time.perf_counter() - started, firsts)

    def ids(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers, one prompt after the other."""
        fixed: dict[str, Any] = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return [list(self._client.generate(prompt, **fixed).token_ids) for prompt in prompts]

    def peak_bytes(self) -> int:
        """Peak memory of the server's processes, in bytes."""
        return sum(machine.peak_bytes(pid) for pid in machine.family(self._server.pid))

    def close(self) -> None:
        self._client.close()
        self._pool.shutdown()
        self._server.stop()


def peer_command(peer: str, model: Path, kind: str = "bf16", tokens: int = 512) -> list[str]:
    """The command line that starts a peer's process for a model.

    For llama.cpp, `kind` is the type of its weights and `tokens` the length of its slots (the longest prompt and
    answer). `SystemExit` if the peer's environment is missing.
    """
    if peer == "transformers":
        return [sys.executable, "-m", "benchmarks.peer_transformers"]
    if peer == "llamacpp":
        folder = Path("~/.cache/saccade/peers/llamacpp").expanduser()
        server = folder / "build" / "bin" / "llama-server"
        if not server.exists():
            raise SystemExit("llama.cpp's server is missing: benchmarks/setup_llamacpp.sh makes it")
        file = gguf_model.converted(model, folder, kind)
        return [sys.executable, str(ROOT / "benchmarks" / "peer_llamacpp.py"), str(server), str(file), str(tokens)]
    python = Path("~/.cache/saccade/peers/vllm/bin/python").expanduser()
    if not python.exists():
        raise SystemExit("vLLM's environment is missing: benchmarks/setup_vllm.sh makes it")
    return [str(python), str(ROOT / "benchmarks" / "peer_vllm.py")]


class Peer:
    """The peer process; its output goes to `log`."""

    def __init__(
        self, peer: str, model: Path, omni: bool, log: Path, device: str = "cpu", kind: str = "bf16", tokens: int = 512,
        *, tokenizer: bool = False,
    ) -> None:  # fmt: skip
        """`tokenizer`: vLLM loads the model's tokenizer, which grammars need."""
        self.peak_bytes = 0
        self._log = log
        environment, command = dict(os.environ), peer_command(peer, model, kind, tokens)
        if peer == "vllm":
            environment.pop("PYTHONPATH", None)
            environment["PYTHONSAFEPATH"] = (
                "1"  # or this folder's modules would stand in for the library's of their name
            )
            # What vLLM's own documentation asks for; it warns that it is slower without.
            environment["LD_PRELOAD"] = str(Path(command[0]).parent.parent / "lib" / "libiomp5.so")
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command, cwd=ROOT if peer == "transformers" else log.parent, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment,
            )  # fmt: skip
        self._ask({"load": str(model), "omni": omni, "device": device, "tokenizer": tokenizer, "tokens": tokens})

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            tail = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise RuntimeError(f"the peer ended with code {self._process.wait()}; the end of {self._log}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, workload: Workload) -> Timed:
        answer = self._ask(
            {
                "prompts": workload.prompts,
                "images": [[str(file) for file in files] for files in workload.images],
                "new_tokens": workload.new_tokens,
            }
        )
        assert answer["tokens"] == workload.output_tokens
        self.peak_bytes = answer["peak_bytes"]
        return Timed(answer["seconds"], answer.get("firsts", []))

    def ids(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy answers, of llama.cpp only."""
        answers = [self._ask({"prompts": [each], "new_tokens": new_tokens, "ids": True})["ids"] for each in prompts]
        return [list(answer[0]) for answer in answers]

    def constrained(
        self, prompts: list[list[int]], schema: dict[str, Any] | None, most: int | list[int]
    ) -> dict[str, Any]:
        """vLLM: `seconds`, `tokens` and the texts of answers that `ended` by themselves under a JSON schema of at most
        `most` tokens; without a schema, answers of exactly these numbers of tokens."""
        return self._ask({"prompts": prompts, "schema": schema, "most": most})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class Sides:
    """What is compared: the peer's name, further options of our server, and the file for the peer's output."""

    peer: str
    options: tuple[str, ...]
    logs: Path
    device: str = "cpu"
    most: int = 32
    """Maximum number of concurrent requests."""
    peer_weights: str = "bf16"
    """llama.cpp: type of its weights."""


def turn(side: Ours | Peer, load: Workload, times: int) -> list[Timed]:
    """Several consecutive runs, begun when the other side's threads are idle."""
    time.sleep(SETTLE)
    return [side.run(load) for _ in range(times)]


def typical(measured: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each number."""
    return {name: statistics.median(each[name] for each in measured) for name in measured[0]}


def measure(sides: Sides, side_by_side: list[tuple[Path, bool, list[Workload]]], rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model, omni, loads in side_by_side:
        if not loads:
            continue
        floor = Floor.of(model)
        ours = Ours(model, sides.options, sides.most)
        try:
            log = sides.logs / f"{sides.peer}{'-omni' if omni else ''}.log"
            tokens = max(len(prompt) + load.new_tokens for load in loads for prompt in load.prompts)
            peer = Peer(sides.peer, model, omni, log, sides.device, sides.peer_weights, tokens)
        except BaseException:
            ours.close()
            raise
        try:
            repeats = {}
            for load in loads:  # once to warm both up
                seconds = min(ours.run(load).seconds, peer.run(load).seconds)
                repeats[load.name] = max(1, round(TURN / seconds))
            times: dict[str, list[tuple[float, float, float]]] = {load.name: [] for load in loads}
            prompts: dict[str, list[tuple[float, float]]] = {load.name: [] for load in loads}
            firsts: dict[str, tuple[list[float], list[float]]] = {load.name: ([], []) for load in loads}
            ceilings: dict[str, list[dict[str, float]]] = {load.name: [] for load in loads}
            for _ in range(rounds):
                for load in loads:
                    mine, theirs = (turn(side, load, repeats[load.name]) for side in (ours, peer))
                    time.sleep(SETTLE)
                    ceilings[load.name].append(machine.ceilings(sides.device))
                    for pair in zip(mine, theirs, strict=True):
                        times[load.name].append((pair[0].seconds, max(pair[0].firsts), pair[1].seconds))
                        for known, timed in zip(firsts[load.name], pair, strict=True):
                            known += timed.firsts
                    if load.new_tokens > 1 and not load.sizes:
                        both = (turn(side, replace(load, new_tokens=1), 1)[0].seconds for side in (ours, peer))
                        prompts[load.name].append((next(both), next(both)))
            memory = ours.peak_bytes(), peer.peak_bytes
        finally:
            ours.close()
            peer.close()
        for load in loads:
            bounds = typical(ceilings[load.name])
            limits = Machine.of(bounds)
            row = row_of(load, times[load.name], firsts[load.name], memory, load.floor(floor, limits))
            row["ceilings"] = bounds
            if prompts[load.name]:
                least = floor.step(limits, len(load.prompts)) * (load.new_tokens - 1)
                row |= decoding(load, row, prompts[load.name], least)
            rows.append(row)
            print(format_row(rows[-1]), flush=True)
    return rows


def row_of(
    load: Workload,
    times: list[tuple[float, float, float]],
    firsts: tuple[list[float], list[float]],
    memory: tuple[int, int],
    floor: float | None,
) -> dict[str, Any]:
    """The result of a workload. `times`: for each run our seconds, our seconds to the last first token, and the peer's
    seconds."""
    mine, first, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    counted = load.prompt_tokens if load.new_tokens == 1 else load.output_tokens
    return {
        "workload": load.name,
        "ours_s": mine,
        "ours_first_token_s": first,
        **percentiles("ours", firsts[0]),
        **percentiles("peer", firsts[1]),
        "peer_s": theirs,
        "ours_tokens_s": counted / mine,
        "peer_tokens_s": counted / theirs,
        "ratio": theirs / mine,
        "floor_fraction": floor / mine if floor else None,
        "peer_floor_fraction": floor / theirs if floor else None,
        "ours_peak_bytes": memory[0],
        "peer_peak_bytes": memory[1],
        "all": times,
    }


def decoding(load: Workload, row: dict[str, Any], prompts: list[tuple[float, float]], least: float) -> dict[str, float]:
    """A workload's decode part, without its prompts. `prompts`: the seconds (ours, the peer's) that the prompts alone
    took in each round."""
    tokens, found = load.output_tokens - len(load.prompts), {}
    for side, alone in zip(("ours", "peer"), zip(*prompts, strict=True), strict=True):
        seconds = row[f"{side}_s"] - statistics.median(alone)
        if seconds <= 0:
            return {}
        found |= {f"{side}_decode_tokens_s": tokens / seconds, f"{side}_decode_floor_fraction": least / seconds}
    return found


def percentiles(side: str, firsts: Sequence[float]) -> dict[str, float]:
    """Percentiles of the seconds to the first token, over all requests and rounds; empty if a side does not report
    them."""
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{side}_first_token_{n}_s": machine.percentile(firsts, share) for n, share in shares.items() if firsts}


def format_row(row: dict[str, Any]) -> str:
    floor = ""
    if row["floor_fraction"]:
        floor = f"of the floor {row['floor_fraction']:4.0%} and {row['peer_floor_fraction']:4.0%}   "
    decode = " and ".join(
        f"{row[f'{side}_decode_tokens_s']:.0f} tok/s ({row[f'{side}_decode_floor_fraction']:.0%})"
        for side in ("ours", "peer")
        if f"{side}_decode_tokens_s" in row
    )
    return (
        f"{row['workload']:16} ours {row['ours_tokens_s']:8.0f} tok/s {row['ours_s']:7.3f} s   "
        f"peer {row['peer_tokens_s']:8.0f} tok/s {row['peer_s']:7.3f} s   ratio {row['ratio']:5.2f}   {floor}"
        f"peak {row['ours_peak_bytes'] / 2**20:5.0f} and {row['peer_peak_bytes'] / 2**20:5.0f} MiB"
        + (f"   decoding alone {decode}" if decode else "")
    )


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(SUBJECTS), default="nemotron_h")
    parser.add_argument("--peer", choices=["transformers", "vllm", "llamacpp"], default="transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="decode,prefill,omni", help="comma-separated kinds of workload")
    parser.add_argument("--weights", choices=WEIGHT_KINDS, help="quantised weights on our side")
    parser.add_argument("--device", default="cpu", help="device of both sides")
    parser.add_argument("--concurrent", default="1,8,32", help="concurrent requests of the decode workloads")
    parser.add_argument("--new-tokens", type=int, default=64, help="output tokens of each concurrent request")
    parser.add_argument(
        "--instruction-set", choices=list(LIMITS), help="what both sides are limited to; of peers, vLLM alone"
    )
    parser.add_argument(
        "--shape",
        choices=sized_models.SHAPES,
        default=sized_models.SMALLEST,
        help="size of nemotron_h; others: text only",
    )
    parser.add_argument("--prompt", type=int, help="tokens of each text prompt, instead of the family's")
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/saccade/benchmarks").expanduser())
    parser.add_argument("--out", type=Path, help="write the result to this file")
    parser.add_argument("--write", action="store_true", help="write a dated result under benchmarks/results")
    parser.add_argument("--label", help="last part of the result's name, such as a processor's: a-z, 0-9 and -")
    return parser


def result_name(arguments: argparse.Namespace) -> str:
    """Name of the result's file, without its date: what differs from the default comparison with a peer."""
    family = None if arguments.family == "nemotron_h" else arguments.family
    shape = None if arguments.shape == sized_models.SMALLEST else arguments.shape
    length = arguments.prompt and f"{arguments.prompt}-tokens"
    ours = (arguments.weights, arguments.instruction_set)
    parts = ("compare", family, arguments.peer, *ours, shape, length, arguments.label)
    return "-".join(part for part in parts if part)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; ends the program if some do not go together."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if arguments.instruction_set and arguments.peer != "vllm":
        parser.error("--instruction-set needs --peer vllm: the other peers cannot be limited")
    if arguments.label is not None and not re.fullmatch(r"[a-z0-9-]+", arguments.label):
        parser.error(f"--label: {arguments.label!r} has other characters than a-z, 0-9 and -")
    if arguments.prompt is not None and arguments.prompt < 1:
        parser.error(f"--prompt: {arguments.prompt} is below 1")
    if arguments.shape != sized_models.SMALLEST and arguments.family != "nemotron_h":
        parser.error(f"--shape {arguments.shape} needs --family nemotron_h")
    if arguments.peer == "llamacpp" and arguments.weights not in PEER_WEIGHTS:
        parser.error(f"--weights {arguments.weights}: llama.cpp has no type like it; int8, int4 and int4-32 have one")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parsed(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    subject, only = SUBJECTS[arguments.family], set(arguments.only.split(","))
    if arguments.shape != sized_models.SMALLEST:
        subject = replace(subject, text=partial(sized_models.sized_model, arguments.shape))
        only -= {"omni"}
    peer_weights = "bf16"
    if arguments.peer == "llamacpp":
        only -= {"omni"}  # its server takes images by way of its own tower files
        peer_weights = PEER_WEIGHTS[arguments.weights]
    load = machine.load()
    if load > 0.5:
        print(f"warning: the load is {load:.1f}; on a busy machine only the ratios mean anything", file=sys.stderr)
    concurrent = [int(count) for count in arguments.concurrent.split(",")]
    ceilings = machine.ceilings(arguments.device)
    print(json.dumps({**machine.describe(), **ceilings, "load": load}))
    with tempfile.TemporaryDirectory() as folder:
        text, omni = workloads(subject, Path(folder), only, concurrent, arguments.new_tokens, arguments.prompt)
        sides = [(subject.text(arguments.folder), False, text)]
        if omni:
            sides.append((subject.omni(arguments.folder), True, omni))
        if arguments.peer == "vllm" and arguments.family == "nemotron_h":
            sides = [
                (models.released_names(path, arguments.folder) if omni else path, omni, l) for path, omni, l in sides
            ]
        options = ("--device", arguments.device, *(("--weights", arguments.weights) if arguments.weights else ()))
        if arguments.instruction_set:
            options = (*options, "--instruction-set", arguments.instruction_set)
            os.environ |= LIMITS[arguments.instruction_set]  # the peer inherits it
        how = Sides(arguments.peer, options, arguments.folder, arguments.device, max(32, *concurrent), peer_weights)
        rows = measure(how, sides, arguments.rounds)
    result = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.compare", *(sys.argv[1:] if argv is None else argv)]),
        "machine": machine.describe() | machine.gpu(),
        "load_before": load,
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
