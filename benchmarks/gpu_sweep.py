"""Times candidate configurations of the kernels on a GPU.

    python -m benchmarks.gpu_sweep [NAME ...] [--device cuda] [--seconds 120] [--out DIR]
    python -m benchmarks.gpu_sweep [NAME ...] --compile DIR [--cache /tmp/triton] [--target sm_90]

Each sweep (`SWEEPS`) replaces one entry of a table of configurations by its candidates. Every candidate's result is
compared with that of the present configuration: it counts only if they differ by less than 1 %. Prints the candidates
from the fastest to the slowest, and writes gpu-sweep.json into DIR. After `--seconds` no further candidate is tried;
what was left out is printed.

`--compile` needs no GPU: it compiles all candidates into DIR, a Triton cache that can be copied to a GPU machine with
the same version of Triton and used there as `--cache` (TRITON_CACHE_DIR), so that no time of the GPU is spent on
compiling. Triton stores absolute paths, so the folder's place on that machine has to be known.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_kernels
from benchmarks.gpu_setting import Setting, argument_parser, timed
from kernels import aot
from kernels.chunk_scan import kernel as chunk_scan
from kernels.dispatch import forced
from kernels.gated_delta import scan_kernel as delta_scan
from kernels.gated_delta import step_kernel as delta_step
from kernels.launch import ARCHITECTURES, architecture, recording
from kernels.moe import kernel as moe
from kernels.paged_attention import kernel as attention
from kernels.patch_embed import kernel as patch_embed
from kernels.rotary import kernel as rotary
from kernels.shapes import NANO_3_OMNI, NANO_V2_12B_VL, QWEN_35B_A3B, ModelShape
from kernels.tiles import AttentionTile, Tile
from kernels.varlen_attention import kernel as varlen_attention

Measures = Callable[[Setting, ModelShape], Iterator[gpu_kernels.Measure]]
NEMOTRONS, QWEN = (NANO_V2_12B_VL, NANO_3_OMNI), (QWEN_35B_A3B,)


@dataclass(frozen=True)
class Sweep:
    """Candidates for an entry of `table[architecture]`, or for the row itself if `entry` is None."""

    table: dict[str, Any]
    candidates: Sequence[Any]
    measures: Measures
    names: Sequence[str]
    """Of the measures that are timed."""
    models: Sequence[ModelShape]
    entry: int | None = None

    @contextmanager
    def using(self, target: str, candidate: Any) -> Iterator[None]:
        """Inside, the table has this candidate."""
        row = self.table[target]
        new = candidate
        if self.entry is not None:
            new = tuple(candidate if index == self.entry else old for index, old in enumerate(row))
        self.table[target] = new
        try:
            yield
        finally:
            self.table[target] = row


def _tiles(kind: Any, *sizes: tuple[int, ...]) -> list[Any]:
    return [kind(*size) for size in sizes]


def _scan(setting: Setting, shape: ModelShape) -> Iterator[gpu_kernels.Measure]:
    yield gpu_kernels.scan_measure(setting, shape)


ATTENTION = gpu_kernels.attention_measures
PROMPT, ROWS = ["extend_attention prompt 8192"], ["decode_attention b64 4096", "decode_attention b1 131072"]
_MANY = (
    (64, 128, 64, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 256, 64, 8, 3),
    (256, 128, 64, 8, 3),
)  # fmt: skip
_FEW = ((16, 64, 128, 4, 3), (16, 64, 128, 4, 4), (16, 64, 128, 4, 6), (16, 64, 64, 4, 6), (16, 128, 128, 4, 4))
_GATED = (
    (16, 64, 128, 4, 3), (16, 64, 128, 4, 4), (16, 64, 128, 4, 6), (16, 64, 64, 4, 6), (64, 64, 64, 4, 4),
    (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4),
)  # fmt: skip
EXPERTS = [f"run_experts {tokens}" for tokens in (1, 64, 4096)]
SWEEPS: dict[str, Sweep] = {
    "attention-prompt": Sweep(
        attention.TILES,
        _tiles(AttentionTile, (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3)),
        ATTENTION, PROMPT, NEMOTRONS, 2,
    ),
    "attention-prompt-wide": Sweep(
        attention.TILES_WIDE,
        _tiles(AttentionTile, (64, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 1), (128, 32, 8, 3)),
        ATTENTION, PROMPT, QWEN, 2,
    ),
    "attention-rows": Sweep(
        attention.TILES,
        _tiles(AttentionTile, (16, 64, 4, 3), (16, 64, 4, 4), (16, 64, 4, 5), (16, 64, 2, 4), (16, 64, 8, 3)),
        ATTENTION, ROWS, NEMOTRONS, 0,
    ),
    "attention-images": Sweep(
        varlen_attention.TILES,
        [(tile, tile) for tile in _tiles(
            AttentionTile, (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 8, 2),
        )],
        gpu_kernels.tower_measures, ["varlen_attention"], (NANO_3_OMNI, QWEN_35B_A3B),
    ),
    "mamba-states": Sweep(
        chunk_scan.STATES[2],
        _tiles(chunk_scan.Configuration, (128, 8, 2), (64, 8, 2), (64, 4, 2), (128, 8, 3), (64, 4, 3), (32, 4, 3)),
        _scan, ["chunk_scan 8192"], NEMOTRONS,
    ),
    "mamba-outputs": Sweep(
        chunk_scan.OUTPUTS[2],
        _tiles(chunk_scan.Configuration, (128, 4, 1), (128, 8, 1), (64, 4, 1), (64, 8, 1), (32, 4, 1)),
        _scan, ["chunk_scan 8192"], NEMOTRONS,
    ),
    "delta-prepare": Sweep(
        delta_scan.PREPARE[2], _tiles(delta_scan.Configuration, (128, 8, 1), (128, 4, 1), (64, 8, 1), (64, 4, 1)),
        gpu_kernels.delta_measures, ["gated_delta_scan 8192"], QWEN,
    ),
    "delta-states": Sweep(
        delta_scan.STATES[2],
        _tiles(delta_scan.Configuration, (32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 8, 2), (16, 4, 3), (128, 8, 2)),
        gpu_kernels.delta_measures, ["gated_delta_scan 8192"], QWEN,
    ),
    "delta-outputs": Sweep(
        delta_scan.OUTPUTS[2],
        _tiles(delta_scan.Configuration, (64, 4, 1), (128, 4, 1), (128, 8, 1), (32, 4, 1), (64, 8, 1)),
        gpu_kernels.delta_measures, ["gated_delta_scan 8192"], QWEN,
    ),
    "delta-step": Sweep(
        delta_step.PARTS, _tiles(delta_step.Part, (2048, 2), (2048, 4), (4096, 2), (4096, 4), (8192, 8), (16384, 8)),
        gpu_kernels.delta_measures, ["gated_delta_update b32", "gated_delta_update b256"], QWEN,
    ),
    "rotary": Sweep(
        rotary.SIZES, [(512, 1), (1024, 1), (1024, 2), (2048, 1), (2048, 2), (2048, 4), (4096, 8)],
        gpu_kernels.delta_measures, ["norm_rotate"], QWEN,
    ),
    "experts": Sweep(
        moe.TILES, [((0, tile),) for tile in _tiles(Tile, *_FEW, *_MANY)],
        gpu_kernels.expert_measures, EXPERTS, (NANO_3_OMNI,),
    ),
    "experts-gated": Sweep(
        moe.TILES_GATED, [((0, tile),) for tile in _tiles(Tile, *_GATED)],
        gpu_kernels.expert_measures, EXPERTS, QWEN,
    ),
    "patches": Sweep(
        patch_embed.TILES,
        _tiles(Tile, (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4)),
        gpu_kernels.tower_measures, ["patch_embed"], (NANO_3_OMNI, QWEN_35B_A3B),
    ),
}  # fmt: skip


def runs(setting: Setting, names: Sequence[str]) -> Iterator[tuple[str, str, gpu_kernels.Measure]]:
    """(sweep, model, measure) of the sweeps with these names."""
    for name in names:
        sweep = SWEEPS[name]
        for shape in sweep.models:
            for measure in sweep.measures(setting, shape):
                if measure.name in sweep.names or not setting.full:
                    yield name, shape.name, measure


def outcome(measure: gpu_kernels.Measure, before: Sequence[Tensor]) -> Tensor:
    """What a call returns and the tensors that it changes, as one vector; these begin as `before`."""
    result = gpu_kernels.outcome(measure, measure.call, before)
    return torch.cat([result, *(tensor.float().reshape(-1) for tensor in measure.changes)])


def sweep_on(setting: Setting, names: Sequence[str], seconds: float) -> dict[str, Any]:
    """{sweep: {"model measure": [[seconds, difference, candidate], ...]}}, the fastest first; candidates that fail or
    give other results last, with None or their difference."""
    target, started = architecture(torch.device(setting.device)), time.perf_counter()
    found: dict[str, Any] = {}
    for name, model, measure in runs(setting, names):
        before = [tensor.clone() for tensor in measure.changes]
        expected = outcome(measure, before)
        rows: list[tuple[float, float | None, str]] = []
        for candidate in SWEEPS[name].candidates:
            if time.perf_counter() - started > seconds:
                print(f"left out: {name} {model} {measure.name} {candidate}", file=sys.stderr, flush=True)
                continue
            with SWEEPS[name].using(target, candidate):
                try:
                    # A measure that changes its arguments and does not say so cannot be compared.
                    differs = (
                        0.0 if name == "rotary" else gpu_kernels.relative_difference(outcome(measure, before), expected)
                    )
                    took = timed(setting, measure.call, 8) if differs < 0.01 else float("inf")
                    rows.append((took, differs, str(candidate)))
                except Exception as failure:  # a candidate may need more than the device has
                    rows.append((float("inf"), None, f"{candidate}: {type(failure).__name__}: {failure}"[:300]))
        rows.sort(key=lambda row: row[0])
        found.setdefault(name, {})[f"{model} {measure.name}"] = [
            [None if took == float("inf") else took, error, candidate] for took, error, candidate in rows
        ]
        for took, error, candidate in rows:
            print(f"{name} {model} {measure.name}: {took * 1e6:.1f} us, differs {error}: {candidate}", flush=True)
    return found


def compile_all(names: Sequence[str], target: str) -> int:
    """Compiles the launches of all candidates into the Triton cache; returns their number. Prints those that spill."""
    count, setting = 0, Setting("meta", "full")
    for name, model, measure in runs(setting, names):
        for candidate in SWEEPS[name].candidates:
            with SWEEPS[name].using(target, candidate), recording(target) as launches, forced("triton"):
                measure.call()
            for launched in launches:
                usage = aot.compile_launch(launched, target)
                count += 1
                if usage.spills or usage.unguarded or usage.shared > aot.SHARED_LIMIT[target]:
                    print(f"{name} {model} {candidate} {launched.kernel.__name__}: {usage}", flush=True)
    return count


def move_cache(folder: Path, to: str) -> None:
    """Rewrites the absolute paths of a Triton cache for its place on another machine."""
    for path in folder.rglob("__grp__*.json"):
        path.write_text(path.read_text().replace(str(folder), to))


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argument_parser(__doc__, seconds=120.0)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"sweeps: {', '.join(SWEEPS)} (default: all)")
    parser.add_argument("--compile", type=Path, metavar="DIR", help="only compile all candidates, into this folder")
    parser.add_argument("--cache", default="/tmp/triton", help="place of that folder on the GPU machine")
    parser.add_argument("--target", choices=ARCHITECTURES, default="sm_90", help="architecture for --compile")
    arguments = parser.parse_args(argv)
    names = arguments.names or list(SWEEPS)
    if unknown := sorted(set(names) - set(SWEEPS)):
        parser.error(f"{', '.join(unknown)}: no such sweep; there are {', '.join(SWEEPS)}")
    if arguments.compile is not None:
        os.environ["TRITON_CACHE_DIR"] = str(arguments.compile.resolve())
        print(f"compiled {compile_all(names, arguments.target)} launches")
        move_cache(arguments.compile.resolve(), arguments.cache)
        return 0
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: no GPU found; --compile DIR needs none")
    found = sweep_on(Setting(arguments.device, arguments.scale), names, arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu-sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
