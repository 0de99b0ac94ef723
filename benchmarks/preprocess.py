"""Cost of preparing an image for the encoder: images per second on one core, by size and format.

    python -m benchmarks.preprocess [--family nemotron_h_omni | --model demo] [--sizes 64x64 1920x1080] [--seconds 1.0]
                                    [--write]

For each size and format: decode, resize and cut into patches, in this process and in a worker process (as a server
does). The two alternate, so that both run under the same conditions. The last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import machine
from benchmarks.record import write_result
from encoder.stopwatch import Stopwatch
from families import VisionSpec
from families.nemotron_h_omni.vision import RadioVision
from families.qwen3_5.vision import QwenVision
from service.media.image_pool import ImagePool
from service.media.images import MediaLimits
from service.media.patches import Patcher

SIZES = ((64, 64), (224, 224), (512, 512), (1080, 1920), (2526, 1786), (3024, 4032))
RULES: dict[str, VisionSpec] = {
    "nemotron_h_omni": RadioVision(),
    "qwen3_5": QwenVision(
        hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072, text_hidden_size=1024
    ),
}  # fmt: skip
FORMATS = ("JPEG", "PNG", "WEBP")


def size(text: str) -> tuple[int, int]:
    """(height, width) of WIDTHxHEIGHT."""
    width, height = map(int, text.split("x"))
    return height, width


def scene(height: int, width: int, form: str) -> bytes:
    """A file with the size of a photograph's: smooth shapes and a little noise."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (17 + 9 * c)) * np.cos(columns / (23 + 5 * c)) for c in range(3)]
    noise = np.random.default_rng(0).normal(0, 4, (height, width, 3))
    pixels = np.clip(np.stack(waves, axis=2) * 90 + 128 + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form, **({} if form == "PNG" else {"quality": 85}))
    return buffer.getvalue()


def in_turn(ways: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of each way, over rounds in which each runs once."""
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(ways))]) < 3:
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(config: VisionSpec, dtype: str, seconds: float, sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    limits = MediaLimits()
    here = Patcher(limits, config, dtype)
    pool = ImagePool(limits, 1, image_seconds=60, video_seconds=60, vision=config, dtype=dtype)
    rows = []
    for (height, width), form in itertools.product(sizes, FORMATS):
        data = scene(height, width, form)
        watch = Stopwatch()
        ways: dict[str, Callable[[], object]] = {
            "here": partial(here.image, data, watch),
            "worker": partial(pool.image, data, Stopwatch()),
        }
        found = in_turn(ways, seconds)
        decode, resize, patch = (
            found["here"] * watch.seconds[stage] / watch.seconds.total() for stage in ("decode", "resize", "patch")
        )
        row = {
            "size": f"{width}x{height}",
            "format": form,
            "bytes": len(data),
            "decode_ms": decode * 1e3,
            "worker_ms": found["worker"] * 1e3,
            "worker_extra_ms": (found["worker"] - found["here"]) * 1e3,
            "resize_ms": resize * 1e3,
            "patch_ms": patch * 1e3,
            "images_per_second_here": 1 / found["here"],
            "images_per_second_worker": 1 / found["worker"],
        }
        print(
            f"{row['size']:>10} {form:5} {len(data) / 1e3:8.0f} kB  decode {row['decode_ms']:7.2f} ms  worker "
            f"+{row['worker_extra_ms']:5.2f} ms  resize {row['resize_ms']:7.2f} ms  cut {row['patch_ms']:6.2f} ms  "
            f"{row['images_per_second_worker']:7.1f} images/s",
            file=sys.stderr,
        )
        rows.append({name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()})
    pool.close()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--family", choices=list(RULES), default="nemotron_h_omni", help="use the released image rule of this family"
    )
    parser.add_argument("--model", help="use the image rule of this model instead")
    parser.add_argument("--sizes", nargs="+", type=size, default=SIZES, metavar="WIDTHxHEIGHT")
    parser.add_argument("--seconds", type=float, default=1.0, help="duration for each size and format")
    parser.add_argument("--write", action="store_true", help="write a dated file to benchmarks/results")
    arguments = parser.parse_args(argv)
    config = RULES[arguments.family]
    if arguments.model:
        from service.model.checkpoint import open_checkpoint

        found = open_checkpoint(arguments.model).config.vision
        if found is None:
            parser.error(f"{arguments.model} takes no images")
        config = found
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    result = {
        "benchmark": "preprocess",
        "model": arguments.model or f"released image rule of {arguments.family}",
        "seconds": arguments.seconds,
        "load": machine.load(),
        "machine": machine.describe(),
        "rows": measure(config, "bfloat16", arguments.seconds, arguments.sizes),
    }
    if arguments.write:
        print(write_result(f"preprocess-{arguments.family}", result), file=sys.stderr)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
