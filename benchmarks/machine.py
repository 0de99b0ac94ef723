"""The machine and its measured limits, for the header of every result."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import math
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.round_trip import round_trip
from kernels.cores import available_cores
from kernels.host_memory import use_huge_pages
from kernels.machine_memory import machine_memory
from kernels.native.instruction_sets import SETS, processor_features, supported

_MODEL = ("cpu family", "model", "CPU implementer", "CPU part")
"""Lines of /proc/cpuinfo that tell processors of one name apart, on x86-64 and on AArch64."""


def describe() -> dict[str, str | int]:
    """Processor, its model, the flags that Saccade's instruction sets need, the best of these sets, cores, memory and
    versions."""
    cpuinfo, features = Path("/proc/cpuinfo"), processor_features()
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    known = frozenset[str]().union(*(each.needs | {flag for flag, _ in each.optional} for each in SETS))
    return {
        "processor": facts.get("model name") or platform.processor() or "unknown",
        "model": ", ".join(f"{name} {facts[name]}" for name in _MODEL if name in facts) or "unknown",
        "flags": " ".join(sorted(features & known)),
        "instruction_set": next((each.name for each in supported(features)), "none"),
        "cores": available_cores().usable,
        "memory_gib": round(machine_memory() / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def gpu() -> dict[str, str]:
    """The GPU's name, driver, clocks and memory from `nvidia-smi`, and Triton's version; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    found = {"name": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
        found |= dict(zip(fields, (value.strip() for value in told.split(",")), strict=True))
    with contextlib.suppress(ImportError):
        found["triton"] = importlib.metadata.version("triton")
    return {f"gpu_{name}": value for name, value in found.items()}


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of `values` that at least this share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def load() -> float:
    """Runnable processes, averaged over the last minute. If it is above 0.5 before a run, other programs disturb the
    numbers."""
    return os.getloadavg()[0]


class ProcessorTime(NamedTuple):
    """Seconds of all processors of the machine since it started."""

    total: float
    busy: float
    own: float
    """Of this process and of those of its descendants that have ended."""

    @classmethod
    def now(cls) -> ProcessorTime | None:
        """None on systems without /proc/stat."""
        if not (stat := Path("/proc/stat")).exists():
            return None
        user, nice, system, idle, waiting, *rest = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
        busy = user + nice + system + sum(rest)
        tick = os.sysconf("SC_CLK_TCK")
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
        return cls((busy + idle + waiting) / tick, busy / tick, own)

    def others(self, end: ProcessorTime) -> float:
        """Share of the machine's time from here to `end` that other programs, or other virtual machines, used."""
        total, busy, own = (after - before for before, after in zip(self, end))
        return max(0.0, busy - own) / total if total else 0.0


@dataclass(frozen=True)
class Before:
    """The machine before a run."""

    load: float
    time: ProcessorTime | None


def before() -> Before:
    """To be called before a run; prints a warning if other programs disturb the numbers."""
    if (found := load()) > 0.5:
        print(f"warning: the load is {found:.1f}; on a busy machine only the ratios mean anything", file=sys.stderr)
    return Before(found, ProcessorTime.now())


def header(benchmark: str, argv: Sequence[str] | None, before: Before) -> dict[str, Any]:
    """What a result of `python -m benchmarks.BENCHMARK` begins with, made after the run, when the programs that it has
    started have ended; `argv`: its arguments if they are not those of the process.

    `others_share` shows whether anything else ran meanwhile (`ProcessorTime.others`)."""
    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join([f"python -m benchmarks.{benchmark}", *(sys.argv[1:] if argv is None else argv)]),
        "machine": describe() | gpu(),
        "load_before": before.load,
    }
    if before.time is not None and (now := ProcessorTime.now()) is not None:
        found["others_share"] = round(before.time.others(now), 3)
    return found


def read_bandwidth(size: int = 1 << 30, repeats: int = 5, device: str = "cpu") -> float:
    """Bytes per second at which all cores together read memory beyond the caches: the best of `repeats` sums. On a
    CPU the memory is in huge pages, as weights and states are, if the system provides them.
    """
    data = torch.empty(size // 4, dtype=torch.float32, device=device)
    use_huge_pages(data)
    data.fill_(1)
    best = min(_timed(data.sum, device) for _ in range(repeats + 1))
    return size / best


def matmul_rate(dtype: torch.dtype = torch.bfloat16, side: int = 2048, repeats: int = 5, device: str = "cpu") -> float:
    """FLOP/s of a large square product: the best of `repeats`, of `a @ b` and of `a @ b.T`."""
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    best = min(_timed(lambda other=other: a @ other, device) for other in (b, b.T) for _ in range(repeats + 1))
    return 2 * side**3 / best


def bf16_rate(side: int = 2048, device: str = "cpu") -> float:
    """FLOP/s at which bfloat16 numbers can be multiplied. On a CPU without bfloat16 instructions it is the rate of
    float32, which represents these numbers exactly; torch multiplies bfloat16 so slowly there that only a small product
    is tried."""
    if device != "cpu":
        return matmul_rate(torch.bfloat16, side, device=device)
    tried = {dtype: matmul_rate(dtype, min(side, 256)) for dtype in (torch.bfloat16, torch.float32)}
    best = max(tried.values())
    return max(matmul_rate(dtype, side) for dtype, rate in tried.items() if rate > best / 4)


def add_rough(parser: argparse.ArgumentParser) -> None:
    """`--rough`."""
    parser.add_argument("--rough", action="store_true", help="measure the machine's limits quickly and badly")


ROUGH_SIDE = 128
"""Side of the products of `--rough`."""


def ceilings(device: str = "cpu", *, rough: bool = False) -> dict[str, float]:
    """Read bandwidth in GB/s and rate of bfloat16 products in GFLOP/s, measured with larger sizes on a GPU. On a CPU
    also the nanoseconds of a round trip between two cores, if they can be measured. `rough`: without it, and with sizes
    that show only whether a benchmark works."""
    size, side = (1 << 30, 2048) if device == "cpu" else (1 << 33, 8192)
    if rough:
        size, side = 1 << 22, ROUGH_SIDE
    bandwidth, rate = read_bandwidth(size, device=device), bf16_rate(side, device)
    found = {"read_gb_s": bandwidth / 1e9, "bf16_gflop_s": rate / 1e9}
    if device == "cpu" and not rough and (trip := round_trip()) is not None:
        found["round_trip_ns"] = trip * 1e9
    return found


def restart_with(variables: Mapping[str, str]) -> None:
    """Starts this program again if one of these environment variables is not set, because libraries read them when they
    are loaded. Variables that are set keep their values."""
    if any(name not in os.environ for name in variables):
        os.execve(sys.executable, sys.orig_argv, {**variables, **os.environ})


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):  # it has ended meanwhile
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def peak_bytes(pid: int) -> int:
    """Peak memory of a process (VmHWM), in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _timed(function: object, device: str = "cpu") -> float:
    assert callable(function)
    started = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def free_port() -> int:
    """A TCP port of this host on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
