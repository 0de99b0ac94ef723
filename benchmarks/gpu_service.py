"""The part `service` of `benchmarks.gpu`: the whole server against transformers, and the embedded model by
concurrency."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import saccade
from benchmarks import machine
from benchmarks.gpu_setting import Record, Setting
from service.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
IMAGE = ROOT / "demo/pictures/shapes.png"
RESERVE = 60.0
"""Seconds that the comparison leaves for the measurements after it."""


def part_service(setting: Setting, ceilings: dict[str, float], record: Record) -> None:
    """The comparison runs first, because it has a required result."""
    record.take("", "transformers", lambda: side_by_side(setting, max(RESERVE, record.left - RESERVE)))
    if record.left <= 0:
        record.take("", "demo", dict)
        return
    arguments = ["demo", "--device", setting.device, "--dtype", "bfloat16", "--max-seqs", "64", "--log-level", "error"]
    with ServerProcess(arguments) as server, saccade.Client(server.address) as client:
        ask(client, setting, 0)
        for callers in (1, 8, 64) if setting.full else (1, 2):
            record.take("demo", str(callers), partial(by_callers, client, setting, callers))


def ask(client: saccade.Client, setting: Setting, seed: int) -> tuple[float, int]:
    """Seconds to the first token of an answer about an image, and its tokens."""
    started, first, tokens = time.perf_counter(), 0.0, 0
    stream = client.stream(
        "What does the picture show?", images=(IMAGE,), max_tokens=setting.pick(64, 4), ignore_eos=True,
        temperature=1.0, seed=seed,
    )  # fmt: skip
    for delta in stream:
        first = first or time.perf_counter() - started
        tokens += len(delta.token_ids)
    return first, tokens


def by_callers(client: saccade.Client, setting: Setting, callers: int) -> dict[str, float]:
    """Output tokens per second, and milliseconds to the first token."""
    rounds = setting.pick(4, 1)
    with ThreadPoolExecutor(callers) as pool:
        started = time.perf_counter()
        answers = list(pool.map(lambda seed: ask(client, setting, seed), range(1, callers * rounds + 1)))
        seconds = time.perf_counter() - started
    firsts = [first for first, _ in answers]
    return {
        "tokens_per_second": sum(tokens for _, tokens in answers) / seconds,
        "first_token_p50_ms": machine.percentile(firsts, 0.5) * 1e3,
        "first_token_p99_ms": machine.percentile(firsts, 0.99) * 1e3,
    }


def side_by_side(setting: Setting, seconds: float) -> Any:
    """The rows of `benchmarks.compare` on this device; if it exceeds `seconds`, the rows it had printed. A message
    instead if nothing could be compared."""
    try:
        import transformers.models.nemotron_h_omni  # noqa: F401
    except ImportError as error:
        return f"this transformers does not know the family ({error}): run `make peers` first"
    command = [sys.executable, "-m", "benchmarks.compare", "--peer", "transformers", "--rounds", "1"]
    command += ["--device", setting.device, "--concurrent", "1,8,64" if setting.full else "1,2"]
    command += ["--new-tokens", str(setting.pick(64, 2)), "--folder", "/tmp/saccade-benchmarks"]
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "rows.json", Path(folder) / "log"
        with log.open("w") as said:
            process = subprocess.Popen(
                [*command, "--out", str(rows)], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its servers and the peer with it
                process.wait()
                return {"cut_off_after_seconds": round(seconds), "said": log.read_text().splitlines()}
        if code:
            raise RuntimeError(f"benchmarks.compare ended with {code}: {log.read_text()[-4000:]}")
        return json.loads(rows.read_text())["rows"]
