"""Jobs with Ray Data: exactly-once output under faults, and the cost of Ray compared with the SDK's own client.

    python -m benchmarks.ray_jobs faults [--rows 20000] [--strikes 6] [--folder DIR] [--write]
    python -m benchmarks.ray_jobs overhead [--rows 4000] [--tokens 32] [--write]

faults     `saccade batch --ray` on a cluster of two nodes (`ray.cluster_utils.Cluster`, real processes). The driver, an
           actor and a worker node are killed at random times, in random order; the driver is started again. At the end
           each id must be in the output exactly once. The peak memory of drivers and object stores is printed.
overhead   the same rows through `Client.map` and a Parquet writer, and through a Ray job on a cluster that is already
           running, in turn. Both with all rows and with a quarter of them: the difference is the cost of further rows,
           and the remainder is the cost of starting a job.

Needs `pip install 'saccade[ray]'`. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from pyarrow import parquet
from ray.cluster_utils import Cluster

import saccade
from benchmarks import machine
from benchmarks.noise import noise_png
from benchmarks.record import write_result
from saccade.ray import RayJob, RowFormat, run_ray_job
from saccade.ray.ids import ID, row_id
from service.commands.server_process import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
SERVER = ["demo", "--log-level", "error", "--threads", "1", "--max-seqs", "32", "--no-warmup"]
STORE = 150 * 2**20
"""Bytes of a node's object store."""
CPUS = 3
"""A node's CPUs as Ray counts them; the processes that read, filter and write rows use one each."""


def write_rows(folder: Path, rows: int, files: int = 8) -> Path:
    """Parquet files with columns id, thing, image (PNG, 2 kB of noise, different in each row)."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for part in range(files):
        numbers = range(part * rows // files, (part + 1) * rows // files)
        images = [noise_png(rng, 24, 24) for _ in numbers]
        columns = {"id": [f"row {n}" for n in numbers], "thing": [f"thing {n}" for n in numbers], "image": images}
        parquet.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=1000)
    return folder


def descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def memory_of(pid: int, name: str) -> int:
    """A line of /proc/PID/status in MiB; 0 if the process has ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) // 1024
    return 0


class FaultRun:
    """One job on a cluster, with processes that are killed."""

    def __init__(self, folder: Path, rows: int, seed: int) -> None:
        self.folder = folder
        self.rows = rows
        self.random = random.Random(seed)
        self.peaks = {"driver_mib": 0, "object_store_mib": 0, "spilled_mib": 0}
        self.strikes: list[str] = []
        self.driver: subprocess.Popen[bytes] | None = None

    def run(self, strikes: int) -> dict[str, Any]:
        """Runs the job to its end. Raises AssertionError if a row is lost or written twice."""
        source, began = write_rows(self.folder / "in", self.rows), time.monotonic()
        with ExitStack() as ends:
            server = ends.enter_context(ServerProcess(SERVER))
            node = {"num_cpus": CPUS, "object_store_memory": STORE, "include_dashboard": False}
            self.cluster = Cluster(initialize_head=True, head_node_args=node)
            ends.callback(self.cluster.shutdown)
            self.worker = self.cluster.add_node(num_cpus=CPUS, object_store_memory=STORE)
            self.command = [
                sys.executable, "-m", "saccade", "batch", str(source), str(self.folder / "out"),
                "--ray", self.cluster.address, "--server", server.address, "--prompt", "What is {thing}?",
                "--id-column", "id", "--image-column", "image", "--sampling", '{"max_tokens": 4, "ignore_eos": true}',
                "--rows-per-file", "256", "--actors", "2", "--concurrency", "16", "--quiet",
            ]  # fmt: skip
            self.start()
            ends.callback(self.end_driver)
            self.strike_until_done(strikes)
        found = parquet.read_table(self.folder / "out", columns=["id", "error"])
        ids = found["id"].to_pylist()
        assert len(ids) == len(set(ids)) == self.rows, (len(ids), len(set(ids)), self.rows)
        assert found["error"].null_count == self.rows
        return {
            "rows": self.rows, "seconds": round(time.monotonic() - began, 1), "strikes": self.strikes,
            "object_store_limit_mib": 2 * STORE // 2**20, **self.peaks,
        }  # fmt: skip

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
        with open(self.folder / "driver.log", "ab") as log:
            self.driver = subprocess.Popen(self.command, cwd=self.folder, stdout=log, stderr=log, env=environment)

    def written(self) -> int:
        """Rows whose ids are recorded."""
        done = 0
        for path in (self.folder / "out.checkpoint").glob("*.parquet"):
            if not path.name.endswith(".pending.parquet"):
                with contextlib.suppress(OSError, pa.ArrowInvalid):
                    done += parquet.read_metadata(path).num_rows
        return done

    def strike_until_done(self, strikes: int) -> None:
        """Kills a process when random shares of the rows are written, and records the peak of memory."""
        due = sorted(self.random.uniform(0.03, 0.9) for _ in range(strikes))
        kinds = [(self.kill_driver, self.kill_actor, self.kill_node)[i % 3] for i in range(strikes)]
        self.random.shuffle(kinds)
        while True:
            assert self.driver is not None
            self.watch()
            code = self.driver.poll()
            if code is not None:
                assert code == 0, (self.folder / "driver.log").read_text(errors="replace")[-4000:]
                return
            done = self.written()
            if due and done >= due[0] * self.rows:
                due.pop(0)
                kinds.pop(0)()
                print(f"{done} rows written: {self.strikes[-1]}", flush=True)
            time.sleep(0.5)

    def watch(self) -> None:
        assert self.driver is not None
        stores = [pid for pid in descendants(os.getpid()) if "/raylet/raylet " in command_of(pid)]
        now = {
            "driver_mib": memory_of(self.driver.pid, "VmRSS"),
            "object_store_mib": sum(memory_of(pid, "RssShmem") for pid in stores),
            "spilled_mib": sum(
                path.stat().st_size for path in Path("/tmp/ray/session_latest").glob("ray_spilled_objects*/*")
            ) // 2**20,
        }  # fmt: skip
        self.peaks = {name: max(peak, now[name]) for name, peak in self.peaks.items()}

    def end_driver(self) -> None:
        assert self.driver is not None
        self.driver.kill()
        self.driver.wait()

    def kill_driver(self) -> None:
        self.end_driver()
        self.start()
        self.strikes.append("driver")

    def kill_actor(self) -> None:
        actors: list[int] = []
        while not actors:  # a driver that has just been started has none yet
            actors = [pid for pid in descendants(os.getpid()) if "MapBatches(Generate)" in command_of(pid)]
            time.sleep(0.1)
        os.kill(self.random.choice(actors), signal.SIGKILL)
        self.strikes.append(f"actor, of {len(actors)}")

    def kill_node(self) -> None:
        self.cluster.remove_node(self.worker, allow_graceful=False)
        self.worker = self.cluster.add_node(num_cpus=CPUS, object_store_memory=STORE)
        self.strikes.append("node")


def own_loop(server: str, source: Path, output: Path, rows: RowFormat) -> float:
    """Seconds for all rows through the SDK's own client and one Parquet writer."""
    table = parquet.read_table(source).to_pylist()
    began = time.perf_counter()
    with saccade.Client(server) as client:
        requests = (
            {"prompt": rows.template.fill(row), "images": [row["image"]], "custom_id": row["id"], **rows.sampling}
            for row in table
        )
        found = [(answer.custom_id, answer.result().text) for answer in client.map(requests, concurrency=32)]
    columns = {ID: [row_id(name) for name, _ in found], "text": [text for _, text in found]}
    parquet.write_table(pa.table(columns), output)
    return time.perf_counter() - began


def overhead(folder: Path, rows: int, tokens: int) -> dict[str, Any]:
    """Seconds of both ways, for a quarter of the rows and for all, in turn. The cluster and the server run already."""
    form = RowFormat(
        "What is {thing}?", id_column="id", images=["image"], sampling={"max_tokens": tokens, "ignore_eos": True}
    )
    sizes = (rows // 4, rows)
    seconds: dict[str, list[float]] = {"own": [], "ray": []}
    with ServerProcess(SERVER) as server:
        ray.init(num_cpus=CPUS + 1, object_store_memory=STORE, include_dashboard=False, log_to_driver=False)
        warm = write_rows(folder / "warm", 64, files=1)
        own_loop(server.address, warm, folder / "warm.parquet", form)
        run_ray_job(RayJob(str(warm), str(folder / "warm-out"), form, server=server.address, progress=False))
        for size in sizes:
            source = write_rows(folder / f"in{size}", size)
            seconds["own"].append(own_loop(server.address, source, folder / f"{size}.parquet", form))
            job = RayJob(str(source), str(folder / f"out{size}"), form, server=server.address, progress=False)
            seconds["ray"].append(run_ray_job(job).seconds)
        ray.shutdown()
    return {"rows": sizes, "tokens": tokens, **costs(sizes, seconds["own"], seconds["ray"])}


def costs(sizes: Sequence[int], own: Sequence[float], rays: Sequence[float]) -> dict[str, Any]:
    """Compares two ways by their seconds for two numbers of rows: whole jobs, further rows, and starts."""
    further = sizes[1] - sizes[0]
    row = {"own": (own[1] - own[0]) / further, "ray": (rays[1] - rays[0]) / further}
    start = {"own": own[0] - sizes[0] * row["own"], "ray": rays[0] - sizes[0] * row["ray"]}
    return {
        "own_seconds": [round(s, 2) for s in own],
        "ray_seconds": [round(s, 2) for s in rays],
        "overhead": [round(there / here - 1, 3) for here, there in zip(own, rays)],
        "row_ms": {name: round(1000 * seconds, 3) for name, seconds in row.items()},
        "row_overhead": round(row["ray"] / row["own"] - 1, 3),
        "start_seconds": {name: round(seconds, 2) for name, seconds in start.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("faults", "overhead"))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--strikes", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the result to benchmarks/results")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="saccade-ray-") as name:
        folder = options.folder or Path(name)
        if options.part == "faults":
            result = FaultRun(folder, options.rows or 20_000, options.seed).run(options.strikes)
        else:
            result = overhead(folder, options.rows or 4000, options.tokens)
    result |= {"part": options.part, "machine": machine.describe(), "load": machine.load(), "ray": ray.__version__}
    if options.write:
        write_result(f"ray-{options.part}", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
