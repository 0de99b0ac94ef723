"""The encoder alone: speed, padding, distance from the machine's limit, and a comparison with transformers.

    python -m benchmarks.encoder [--only mixes,operations,peer,packing,preprocess] [--rounds 3] [--images 32] [--rough]
                                 [--write]

`mixes`       images/s, ratio of padded to real tokens and share of the measured GEMM rate, for three mixes of sizes,
              each run eagerly (compiled code if the machine supports it), operation by operation, by graphs with
              power-of-two budgets, and by graphs with the same number of budgets tuned to the mix
`operations`  time of the compiled tower by operation: shares, and the products' share of the GEMM rate
`peer`        16 images of mixed sizes in one call: Saccade's tower and transformers' with the same weights, dtype and
              threads, in turn in one process; it stops if the results disagree
`packing`     microseconds per image of choosing the batches
`preprocess`  images/s on one core, decoding and patching separately, by size and format

FLOPs count real rows only, so padding lowers the share of the GEMM rate. Everything runs in bfloat16 with one thread
per core. Run it on an idle machine; it takes less than four minutes there.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import machine, models
from benchmarks.record import add_options, write_result
from encoder.budget import resolve_budgets
from encoder.images import decode_image
from encoder.item import EncoderItem
from encoder.packing import pack
from encoder.runner import EncoderOptions, EncoderRunner
from encoder.tune import packed_ladder, tuned_ladder
from families.nemotron_h_omni.tower import RadioTower
from families.nemotron_h_omni.vision import RadioVision
from kernels.cores import available_cores
from kernels.host_memory import keep_freed_memory
from kernels.native.tower import Code, TowerOp, TowerStep
from service.model.checkpoint import open_checkpoint

DTYPE = torch.bfloat16
PARTS = ("mixes", "operations", "peer", "packing", "preprocess")
AGREEMENT = 0.02
"""Maximum relative RMS difference between Saccade's and the peer's bfloat16 rows. If it is larger, the times are not
comparable."""


# -- images ---------------------------------------------------------------------------------------------------------


def uniform(rng: random.Random) -> tuple[int, int]:
    """Any valid grid of 8 to 32 patches a side."""
    return 2 * rng.randint(4, 16), 2 * rng.randint(4, 16)


def documents(rng: random.Random) -> tuple[int, int]:
    """Pages near the largest grid, a few of them crops."""
    return (36, 28) if rng.random() < 0.6 else (2 * rng.randint(14, 18), 2 * rng.randint(11, 14))


def thumbnails(rng: random.Random) -> tuple[int, int]:
    """Small squares and near-squares."""
    return 2 * rng.randint(4, 6), 2 * rng.randint(4, 6)


MIXES: dict[str, Callable[[random.Random], tuple[int, int]]] = {
    "uniform": uniform,
    "documents": documents,
    "thumbnails": thumbnails,
}


def random_images(kind: str, count: int, config: RadioVision) -> list[EncoderItem]:
    """`count` images of random patches, the same each time."""
    rng = random.Random(f"{kind} {count}")
    generator = torch.Generator().manual_seed(count)
    made = []
    for _ in range(count):
        grid = MIXES[kind](rng)
        patches = torch.randn(grid[0] * grid[1], config.patch_dim, generator=generator).to(DTYPE)
        made.append(EncoderItem(grid, patches, merge_size=config.merge_size))
    return made


def flops(images: Sequence[EncoderItem], config: RadioVision) -> float:
    """FLOPs of the matrix products that these images need: patch embedding, attention and MLP of each layer,
    projections, projector."""
    width, inner, total = config.hidden_size, config.intermediate_size, 0.0
    mlp = (3 if config.use_swiglu_ffn else 2) * width * inner
    for image in images:
        patches = image.grid[0] * image.grid[1]
        rows = patches + config.num_prefix_tokens
        layer = 2 * rows * (4 * width**2 + mlp) + 4 * rows**2 * width
        head = 2 * image.tokens * config.projector_hidden_size * (4 * width + config.text_hidden_size)
        total += config.num_layers * layer + 2 * patches * config.patch_dim * width + head
    return total


def destinations(images: Sequence[EncoderItem], config: RadioVision) -> list[torch.Tensor]:
    return [torch.empty(image.tokens, config.text_hidden_size, dtype=DTYPE) for image in images]


def tower_of(path: Path) -> RadioVision:
    """The tower of `models.omni_model`."""
    config = open_checkpoint(str(path)).config.vision
    assert isinstance(config, RadioVision)
    return config


def make_runner(
    path: Path, *, graphs: str, token_budgets: tuple[int, ...] | None = None, max_images: int | None = None,
    native: str = "auto",
) -> EncoderRunner:  # fmt: skip
    options = EncoderOptions(
        dtype=DTYPE, graphs=graphs, token_budgets=token_budgets, max_images=max_images, native=native
    )
    return EncoderRunner(tower_of(path), options, open_checkpoint(str(path)).vision_weights())


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# -- the parts --------------------------------------------------------------------------------------------------------


@dataclass
class Ceiling:
    """The best measured rate of a large product, in FLOP/s."""

    side: int
    best: float = 0.0

    def measure(self) -> None:
        self.best = max(self.best, machine.bf16_rate(self.side))


def measure_mixes(path: Path, count: int, rounds: int, ceiling: Ceiling) -> list[dict[str, Any]]:
    """Each round measures the ceiling again."""
    rows = []
    eager, config = make_runner(path, graphs="off"), tower_of(path)
    for mix in MIXES:
        images = random_images(mix, count, config)
        out = destinations(images, config)
        histogram = Counter(image.tokens for image in images)
        doublings = resolve_budgets(config.least_budget, config.max_image_tokens)
        tuned = packed_ladder(
            histogram,
            len(doublings.token_budgets),
            images=doublings.max_images,
            hi=config.max_image_tokens,
            batch=count,
        )
        ways = {
            "eager": eager,
            "operations": make_runner(path, graphs="off", native="off"),
            "doublings": make_runner(path, graphs="on"),
            "tuned": make_runner(path, graphs="on", token_budgets=tuple(tuned), max_images=doublings.max_images),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        before = {way: runner.stats() for way, runner in ways.items()}
        for runner in ways.values():
            runner.encode(images[:2], out[:2])
        for _ in range(rounds):
            ceiling.measure()
            for way, runner in ways.items():
                times[way].append(seconds(functools.partial(runner.encode, images, out)))
        for way, runner in ways.items():
            stats = {name: value - before[way].get(name, 0) for name, value in runner.stats().items()}
            took = statistics.median(times[way])
            row = {
                "mix": mix,
                "way": way,
                "images_s": count / took,
                "padding": (stats["real_tokens"] + stats["padded_tokens"]) / stats["real_tokens"],
                "gemm_fraction": flops(images, config) / took / ceiling.best,
                "token_budgets": list(runner.budgets.token_budgets) if way in ("doublings", "tuned") else [],
                "seconds": times[way],
            }
            rows.append(row)
            print(
                f"{mix:11} {way:10} {row['images_s']:8.1f} images/s   padding {row['padding']:5.3f}   "
                f"{row['gemm_fraction']:4.0%} of the GEMM rate",
                flush=True,
            )
            if runner is not eager:
                runner.close()
    return rows


def measure_operations(path: Path, rounds: int, ceiling: Ceiling) -> list[dict[str, Any]]:
    """Each round measures the ceiling again. Operations run one at a time, so each share is a share of their sum."""
    runner = make_runner(path, graphs="off", native="on")
    config = tower_of(path)
    images = random_images("uniform", 8, config)
    out = destinations(images, config)
    times: dict[str, float] = defaultdict(float)
    work: Counter[str] = Counter()

    def hear(op: TowerOp, step: TowerStep, took: float) -> None:
        weight = op.weight
        name = f"{weight.k} to {weight.n}" if op.code == Code.LINEAR else Code(op.code).name.lower()
        times[name] += took
        work[name] += 2 * weight.n * weight.k * (step.rows, step.patches, step.tokens)[op.of]

    runner.encode(images, out)
    tower = runner.tower
    assert isinstance(tower, RadioTower) and tower.native is not None
    tower.native.on_operation = hear
    for _ in range(rounds):
        ceiling.measure()
        runner.encode(images, out)
    work["attention"] = round(rounds * flops(images, config)) - sum(work.values())
    rows: list[dict[str, Any]] = []
    for name, took in sorted(times.items(), key=lambda each: -each[1]):
        share, rate = took / sum(times.values()), work[name] / took / ceiling.best
        rows.append({"operation": name, "share": share, "seconds": took / rounds, "gemm_fraction": rate})
        print(f"{name:13} {share:4.0%} of the time   {rate:4.0%} of the GEMM rate", flush=True)
    return rows


def measure_peer(path: Path, rounds: int) -> dict[str, Any]:
    import transformers
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import NemotronH_Omni_Reasoning_V3

    transformers.logging.set_verbosity_error()
    kind: Any = NemotronH_Omni_Reasoning_V3
    peer = kind.from_pretrained(path, dtype=DTYPE, attn_implementation="sdpa").eval()
    runner = make_runner(path, graphs="auto")
    config = tower_of(path)
    images = random_images("uniform", 16, config)
    out = destinations(images, config)
    patches = torch.cat([image.patches for image in images])
    grids = torch.tensor([image.grid for image in images])

    @torch.inference_mode()
    def theirs() -> Any:
        return peer.get_image_features(patches, grids).pooler_output

    expected = torch.cat(list(theirs())).float()
    runner.encode(images, out)
    error = float((torch.cat(out).float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    if not error <= AGREEMENT:
        raise SystemExit(f"--only peer: rows differ from transformers' by {error:.4f} relative RMS, above {AGREEMENT}")
    pairs = [(seconds(lambda: runner.encode(images, out)), seconds(theirs)) for _ in range(2 * rounds)]
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    result = {
        "images": len(images),
        "tokens": sum(image.tokens for image in images),
        "ours_s": mine,
        "transformers_s": other,
        "ratio": statistics.median(b / a for a, b in pairs),
        "relative_rms": error,
        "used_budgets": runner.lanes["image"].used_budgets,
        "transformers": transformers.__version__,
        "all": pairs,
    }
    print(
        f"16 mixed images: ours {mine * 1e3:.0f} ms, transformers {other * 1e3:.0f} ms, ratio {result['ratio']:.2f} "
        f"(rows differ by {error:.4f} relative RMS)",
        flush=True,
    )
    return result


def measure_packing(rounds: int) -> list[dict[str, Any]]:
    rows = []
    rng = random.Random(0)
    budgets = resolve_budgets(64, 8192)
    for count in (1, 4, 8, 16, 64):
        counts = [rng.randint(33, 2000) for _ in range(count)]
        pack(counts, budgets)
        best = min(seconds(functools.partial(pack, counts, budgets)) for _ in range(20 * rounds))
        rows.append({"images": count, "microseconds": best * 1e6, "microseconds_per_image": best * 1e6 / count})
        print(f"packing {count:3} images: {rows[-1]['microseconds_per_image']:6.1f} us each", flush=True)
    return rows


def measure_tuning(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for sizes, budgets in ((256, 8), (1024, 16), (4096, 32)):
        histogram = {size: 1 + size * 7919 % 97 for size in range(1, sizes + 1)}
        best = min(seconds(functools.partial(tuned_ladder, histogram, budgets)) for _ in range(3 * rounds))
        rows.append({"sizes": sizes, "budgets": budgets, "seconds": best})
        print(f"tuning {budgets:2} budgets for {sizes:4} sizes: {best * 1e3:6.1f} ms", flush=True)
    return rows


@functools.cache
def scene(height: int, width: int) -> Image.Image:
    """An image that compresses like a photograph: smooth gradients with some grain."""
    rng = np.random.default_rng(height)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    smooth = np.stack([np.sin(x / 97) + np.cos(y / 61), np.sin((x + y) / 131), np.cos(x / 43) * np.sin(y / 89)], -1)
    grain = rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(np.clip(127 + 60 * smooth + grain, 0, 255).astype(np.uint8))


def measure_preprocessing(rounds: int) -> list[dict[str, Any]]:
    """The released preprocessing rule: patches of 16, 1024 to 13312 of them. One thread."""
    config = RadioVision()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for height, width in ((224, 224), (480, 640), (1080, 1920), (3024, 4032)):
            for kind in ("JPEG", "PNG", "WEBP"):
                buffer = io.BytesIO()
                scene(height, width).save(buffer, kind, **({"compress_level": 3} if kind == "PNG" else {"quality": 90}))
                data = buffer.getvalue()
                repeats = rounds if height * width < 1 << 20 else 1
                decode = min(seconds(functools.partial(decode_image, data)) for _ in range(repeats))
                pixels = decode_image(data)
                cut = functools.partial(config.image_rule.patchify, pixels, DTYPE)
                patch = min(seconds(cut) for _ in range(repeats))
                row = {
                    "size": f"{width}x{height}", "format": kind, "bytes": len(data), "decode_s": decode,
                    "patchify_s": patch, "images_s": 1 / (decode + patch),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{row['size']:9} {kind:4} {row['images_s']:7.1f} images/s on a core   decode "
                    f"{decode * 1e3:6.1f} ms   resize and cut {patch * 1e3:6.1f} ms",
                    flush=True,
                )
    finally:
        torch.set_num_threads(threads)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=32, help="images in each mix")
    parser.add_argument("--threads", type=int, default=available_cores().usable, help="default: one per core")
    add_options(parser)
    machine.add_rough(parser)
    arguments = parser.parse_args(argv)
    parts = arguments.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, got {arguments.only}")
    keep_freed_memory()  # as in the engine process; it also speeds up transformers, which runs in this process
    torch.set_num_threads(arguments.threads)
    before = machine.before()
    ceiling = Ceiling(machine.ROUGH_SIDE if arguments.rough else 2048)
    ceiling.measure()
    print(json.dumps({**machine.describe(), "bf16_gflop_s": ceiling.best / 1e9, "load": before.load}), flush=True)
    started = time.perf_counter()
    result: dict[str, Any] = {}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if {"mixes", "operations", "peer"} & set(parts):
        path = models.omni_model(arguments.folder)
    if "mixes" in parts:
        result["mixes"] = measure_mixes(path, arguments.images, arguments.rounds, ceiling)
    if "operations" in parts:
        result["operations"] = measure_operations(path, arguments.rounds, ceiling)
    if "peer" in parts:
        result["peer"] = measure_peer(path, arguments.rounds)
    if "packing" in parts:
        result["packing"] = measure_packing(arguments.rounds)
        result["tuning"] = measure_tuning(arguments.rounds)
    if "preprocess" in parts:
        result["preprocess"] = measure_preprocessing(arguments.rounds)
    result["bf16_gflop_s"] = ceiling.best / 1e9
    result["seconds"] = time.perf_counter() - started
    result = {**machine.header("encoder", argv, before), "threads": torch.get_num_threads(), **result}
    if arguments.write:
        print(f"written to {write_result('encoder', result)}", file=sys.stderr)
    print(json.dumps(summary(result)))
    return 0


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The main numbers, for the last line of the output."""
    short: dict[str, Any] = {"seconds": round(result["seconds"], 1)}
    for row in result.get("mixes", ()):
        numbers = {"images_s": round(row["images_s"], 1), "padding": round(row["padding"], 3)}
        short[f"{row['mix']} {row['way']}"] = {**numbers, "gemm_fraction": round(row["gemm_fraction"], 3)}
    if "peer" in result:
        short["transformers ratio"] = round(result["peer"]["ratio"], 3)
    return short


if __name__ == "__main__":
    sys.exit(main())
