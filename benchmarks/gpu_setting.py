"""What the GPU programs share: options, device and scale, timing with a cold cache, the record of results."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CACHE_BYTES = 1 << 30
"""Bytes written between timed calls. This evicts data that a real step would not find in the GPU's cache, and keeps the
GPU busy while the host submits the call, so that device time is measured and not Python's."""


@dataclass(frozen=True)
class Setting:
    """Device and scale."""

    device: str
    scale: str

    @property
    def full(self) -> bool:
        return self.scale == "full"

    def pick(self, full: int, tiny: int) -> int:
        return full if self.full else tiny

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)


def argument_parser(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """A parser of the options of all GPU programs. `seconds`: default of the time after which nothing else begins."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--seconds", type=float, default=seconds, help="time after which nothing else begins")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build")))
    return parser


def timed(setting: Setting, call: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of a call on the device, with a cold cache."""
    for _ in range(3 if setting.full else 1):
        call()
    if setting.device == "cpu":
        return statistics.median(wall(call) for _ in range(3))
    flushed = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=setting.device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flushed.zero_()
        start.record()
        call()
        end.record()
    setting.wait()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def wall(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_ceilings(setting: Setting) -> dict[str, float]:
    """Copy: bytes read and written per second. Matmul: FLOP/s of a large square product of random numbers."""
    size, side = setting.pick(4 << 30, 8 << 20), setting.pick(8192, 256)
    source = torch.empty(size, dtype=torch.uint8, device=setting.device).random_()
    target = torch.empty_like(source)
    copy = timed(setting, lambda: target.copy_(source))
    a, b = setting.random(side, side), setting.random(side, side)
    product = timed(setting, lambda: a @ b)
    return {"copy_gb_s": 2 * size / copy / 1e9, "bf16_tflop_s": 2 * side**3 / product / 1e12}


class Record:
    """Results of a part. The file is rewritten after each entry, so that a run that is killed keeps what it has
    measured. No measurement begins after the part's time is over."""

    def __init__(self, path: Path, head: dict[str, Any], seconds: float) -> None:
        """`seconds`: time limit of the part. `head`: entries copied to the file unchanged."""
        self._path, self._started, self._seconds = path, time.perf_counter(), seconds
        self.result: dict[str, Any] = {**head, "seconds": 0.0, "left_out": [], "errors": {}}

    @property
    def left(self) -> float:
        """Seconds left for the part."""
        return self._seconds - (time.perf_counter() - self._started)

    def take(self, section: str, name: str, measure: Callable[[], Any]) -> None:
        """Runs a measurement and stores its result under both names. If it fails, its error is stored and the next one
        runs; if there is no time left, its name is added to `left_out`."""
        label, started = f"{section} {name}".strip(), time.perf_counter()
        if self.left <= 0:
            self.result["left_out"].append(label)
            said: Any = "left out: the time is up"
        else:
            try:
                said = measure()
                (self.result.setdefault(section, {}) if section else self.result)[name] = said
            except Exception:
                self.result["errors"][label] = said = traceback.format_exc()[-4000:]
        print(f"{label}: {said} ({time.perf_counter() - started:.1f} s)", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        self.result["seconds"] = round(time.perf_counter() - self._started, 1)
        self._path.write_text(json.dumps(self.result, indent=1) + "\n")
