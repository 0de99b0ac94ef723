"""Load over HTTP by `vllm bench serve`, from vLLM's own environment, on Saccade's server, vLLM's or llama.cpp's.

    python -m benchmarks.http_load [--kind text|images] [--side ours|vllm|llamacpp] [--rates 4,8,inf] [--seconds 30]
                                   [--threads-bind 0-1] [--write]

text      /v1/completions, prompts of 128 random tokens, answers of 64
images    /v1/chat/completions, 32 random tokens and an image of 448 x 448 random pixels as PNG, answers of 32

A run starts one server on the benchmarks' random checkpoint of 116 M parameters, sends requests at each rate (Poisson
arrivals, the same to every server; `inf`: all at once) for about that many seconds, and reports time to first token,
inter-token latency and throughput as the load generator measures them. The load generator shares the machine with the
server. Servers have their default options except bfloat16 and 32 concurrent requests. Every run has different prompts,
so that no cache helps.

`--write` adds a run's cells to today's file in benchmarks/results, where they replace earlier cells of the same side,
kind and rate, and draws the plot. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gguf_model, machine, models, record
from benchmarks.http_load_plot import draw
from kernels.cores import available_cores
from service.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
VLLM = Path("~/.cache/saccade/peers/vllm").expanduser()
LLAMA = Path("~/.cache/saccade/peers/llamacpp").expanduser()
SEQS, LENGTH = 32, 1024
SIDES = ("ours", "vllm", "llamacpp")
RATES = {"text": "6,12,inf", "images": "2,4,inf"}
AT_ONCE = {"text": 128, "images": 48}
"""Requests of a run at the rate `inf`."""
REQUESTS: dict[str, list[str]] = {
    "text": [
        "--backend", "openai", "--endpoint", "/v1/completions", "--dataset-name", "random",
        "--random-input-len", "128", "--random-output-len", "64",
    ],
    "images": [
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--dataset-name", "random-mm",
        "--random-input-len", "32", "--random-output-len", "32", "--random-mm-base-items-per-request", "1",
        "--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}',
        "--random-mm-bucket-config", "{(448, 448, 1): 1.0}",
    ],
}  # fmt: skip
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The program of `vllm bench serve`. The command itself looks for a package whose name is not that of the CPU build."""
KEPT = (
    "completed", "failed", "duration", "request_throughput", "output_throughput", "total_input_tokens",
    "total_output_tokens",
)  # fmt: skip


def vllm_environment(threads_bind: str | None = None) -> dict[str, str]:
    """The environment of vLLM's programs that its documentation recommends on a CPU."""
    found = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    found |= {
        "PYTHONSAFEPATH": "1", "LD_PRELOAD": str(VLLM / "lib" / "libiomp5.so"), "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    return found | ({"VLLM_CPU_OMP_THREADS_BIND": threads_bind} if threads_bind else {})


@contextlib.contextmanager
def served(side: str, kind: str, model: Path, threads_bind: str | None) -> Iterator[str]:
    """The address of a server of the model, once it answers. SystemExit if its program is missing or ends."""
    if side == "ours":
        options = ["--dtype", "bfloat16", "--max-seqs", str(SEQS), "--max-len", str(LENGTH), "--log-level", "error"]
        with ServerProcess([str(model), "--http-port", "0", *options]) as server:
            yield server.http_url
        return
    port = machine.free_port()
    environment = dict(os.environ)
    if side == "vllm":
        environment = vllm_environment(threads_bind)
        command = [
            str(VLLM / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--served-model-name", model.name, "--port", str(port), "--dtype", "bfloat16", "--max-model-len",
            str(LENGTH), "--max-num-seqs", str(SEQS),
        ]  # fmt: skip
        if kind == "images":
            limits = json.dumps({"image": 1, "video": 0})
            command += ["--trust-remote-code", "--limit-mm-per-prompt", limits, "--skip-mm-profiling"]
    else:
        environment.pop("OMP_NUM_THREADS", None)
        threads = str(available_cores().usable)
        command = [
            str(LLAMA / "build" / "bin" / "llama-server"), "-m", str(gguf_model.converted(model, LLAMA)), "--port",
            str(port), "-t", threads, "-tb", threads, "--parallel", str(SEQS), "-c", str(SEQS * 512), "--no-webui",
            "-fit", "off",
        ]  # fmt: skip
    if not Path(command[0]).exists():
        raise SystemExit(f"{side} is missing; run benchmarks/setup_{side}.sh first")
    log = record.FOLDER / f"http-load-{side}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=record.FOLDER)
    try:
        _await(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(url, timeout=5)
            return
        if process.poll() is not None:
            tail = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-15:])
            raise SystemExit(f"the server ended with {process.returncode}; the end of {log}:\n{tail}")
        time.sleep(0.25)
    raise SystemExit(f"the server does not answer; see {log}")


def cell(url: str, kind: str, model: Path, rate: str, seconds: float, seed: int) -> dict[str, Any]:
    """The load generator's numbers at one rate."""
    count = AT_ONCE[kind] if rate == "inf" else max(8, round(float(rate) * seconds))
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(VLLM / "bin" / "python"), "-c", BENCH, "--base-url", url, "--model", model.name, "--tokenizer",
            str(model), "--trust-remote-code", *REQUESTS[kind], "--num-prompts", str(count), "--request-rate", rate,
            "--ignore-eos", "--temperature", "0", "--seed", str(seed), "--num-warmups", "2", "--disable-tqdm",
            "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--save-result",
            "--result-dir", folder, "--result-filename", "result.json",
        ]  # fmt: skip
        done = subprocess.run(command, env=vllm_environment(), cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the load generator failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        told = json.loads((Path(folder) / "result.json").read_text())
    numbers = {name: told[name] for name in KEPT if name in told}
    for metric in ("ttft", "tpot", "itl", "e2el"):
        numbers |= {f"{metric}_{share}_ms": told[f"{share}_{metric}_ms"] for share in ("p50", "p99")}
    return {"requests": count, **numbers}


def measure(side: str, kind: str, rates: Sequence[str], seconds: float, bind: str | None) -> list[dict[str, Any]]:
    """The cells of one server."""
    model = models.written_model(record.FOLDER) if kind == "text" else models.chat_omni_model(record.FOLDER)
    cells = []
    with served(side, kind, model, bind) as url:
        cell(url, kind, model, "8", 1, seed=99)  # not counted: it warms up memory and compiled code
        for index, rate in enumerate(rates):
            load = machine.load()
            numbers = cell(url, kind, model, rate, seconds, seed=index)
            cells.append({"kind": kind, "side": side, "rate": rate, "load": load, **numbers})
            print(row(cells[-1]), flush=True)
    return cells


def row(cell: dict[str, Any]) -> str:
    first, between = (f"{cell[f'{m}_p50_ms']:8.1f} {cell[f'{m}_p99_ms']:8.1f} ms" for m in ("ttft", "itl"))
    return (
        f"{cell['kind']:7}{cell['side']:9}{cell['rate']:>5}/s  first token {first}  between tokens {between}  "
        f"{cell['output_throughput']:7.0f} tok/s  {cell['completed']} of {cell['requests']}"
    )


def write(cells: Sequence[dict[str, Any]], command: str) -> Path:
    """Merges the cells into today's file."""
    path = record.path_of("http-load")
    result: dict[str, Any] = {"date": f"{datetime.date.today()}", "machine": machine.describe(), "cells": []}
    if path.exists():
        result = json.loads(path.read_text())
    new = {(c["kind"], c["side"], c["rate"]) for c in cells}
    kept = [c for c in result["cells"] if (c["kind"], c["side"], c["rate"]) not in new]
    added = [{**c, "command": command} for c in cells]
    order = {"text": 0, "images": 1}
    result["cells"] = sorted(kept + added, key=lambda c: (order[c["kind"]], float(c["rate"]), SIDES.index(c["side"])))
    record.write_result("http-load", result)
    draw(result, path.with_suffix(".png"))
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(REQUESTS), default="text")
    parser.add_argument("--side", choices=SIDES, default="ours")
    parser.add_argument("--rates", help=f"requests per second, comma-separated (default: {RATES})")
    parser.add_argument("--seconds", type=float, default=30.0, help="approximate length of a run at one rate")
    parser.add_argument(
        "--threads-bind", help="VLLM_CPU_OMP_THREADS_BIND: by default vLLM reserves a core for its scheduler"
    )
    parser.add_argument("--write", action="store_true", help="write the cells to today's file and draw the plot")
    arguments = parser.parse_args(argv)
    if (arguments.kind, arguments.side) == ("images", "llamacpp"):
        parser.error("--kind images --side llamacpp: llama.cpp's server needs separate tower files for images")
    rates = (arguments.rates or RATES[arguments.kind]).split(",")
    cells = measure(arguments.side, arguments.kind, rates, arguments.seconds, arguments.threads_bind)
    if arguments.write:
        told = " ".join(["python -m benchmarks.http_load", *(sys.argv[1:] if argv is None else argv)])
        print(f"written to {write(cells, told).relative_to(ROOT)} and .png", file=sys.stderr)
    print(json.dumps(cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
