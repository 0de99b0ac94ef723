"""Where a step's time goes: parts of a decode step and of a prefill, against the least that the machine could need.

    python -m benchmarks.profile [--weights int8] [--threads N] [--write]

Runs the decoder in process on the 116 M model of `benchmarks.models`, with the operations of the compiled step called
one at a time, which costs each a few microseconds. The least time of a part is its bytes over the measured bandwidth
or its FLOPs over the measured rate of a large bf16 product, whichever is more; a state is read and written. `--write`
makes docs/profile.md. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import machine, models
from decoder.layers.descriptions import Mlp
from decoder.native import NativeStep
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from kernels.native.structs import Code, Kind, Op
from service.common.config import EngineOptions
from service.engine.build import decoder_options
from service.model.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "profile.md"
BITS = {Kind.F32: 32, Kind.BF16: 16, Kind.INT8: 8, Kind.INT4: 4}


@dataclass
class Part:
    """One kind of work, over all layers of a step."""

    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0


def name_of(op: Op, native: NativeStep) -> str:
    """Which part of a layer an operation is."""
    if op.code != Code.LINEAR:
        return {
            Code.MAMBA: "Mamba: convolution, state, gated norm", Code.ATTENTION: "attention over pages",
            Code.EXPERTS: "experts",
        }.get(Code(op.code), "norms, activations, conversions")  # fmt: skip
    n, k = op.weight.n, op.weight.k
    config, inner = native.config, native.mamba.inner
    if n == config.vocab_size:
        return "vocabulary projection"
    if {n, k} & {mixer.intermediate_size for mixer in config.mixers if isinstance(mixer, Mlp)}:
        return "MLP projections"
    return "Mamba projections" if inner == k or n > 2 * inner else "attention projections"


def cost_of(op: Op, native: NativeStep, tokens: int, rows: int) -> tuple[float, float]:
    """(bytes, FLOPs) that an operation cannot do without. Reference: decoder.md C6."""
    if op.code == Code.LINEAR:
        size = op.weight.n * op.weight.k
        return size * BITS[Kind(op.weight.kind)] / 8, 2.0 * size * tokens
    if op.code == Code.MAMBA:
        state = native.mamba.inner * native.mamba.ssm_state_size
        return 2.0 * 4 * state * rows, 6.0 * state * tokens
    return 0.0, 0.0


class Profile:
    """The parts of one kind of step: the quickest of some."""

    def __init__(self, runner: DecoderRunner) -> None:
        self.runner = runner
        self.best: tuple[float, dict[str, Part]] | None = None

    def step(self, tokens: int, rows: int, drawn: int) -> None:
        """One step of so many tokens and rows, `drawn` of which get logits."""
        native, config = self.runner.model.native, self.runner.config
        if native is None:
            raise SystemExit("this machine has no compiled step to take apart")
        parts: dict[str, Part] = defaultdict(Part)

        def hear(op: Op, seconds: float) -> None:
            part = parts[name_of(op, native)]
            head = op.code == Code.LINEAR and op.weight.n == config.vocab_size
            amount, flops = cost_of(op, native, drawn if head else tokens, rows)
            part.seconds += seconds
            part.bytes += amount
            part.flops += flops

        native.on_operation = hear
        started = time.perf_counter()
        self.runner.step()
        total = time.perf_counter() - started
        native.on_operation = None
        called = total - sum(part.seconds for part in parts.values())
        parts["Python, sampling, layers that are called"].seconds = called
        if self.best is None or total < self.best[0]:
            self.best = total, dict(parts)


def requests(runner: DecoderRunner, count: int, length: int) -> None:
    rng = random.Random(count)
    for index in range(count):
        prompt = [rng.randrange(3, models.VOCAB - 1) for _ in range(length)]
        params = SamplingParams(max_tokens=512, temperature=0, ignore_eos=True)
        runner.add(DecoderRequest(f"{index}", prompt, params))


def drop(runner: DecoderRunner, count: int) -> None:
    for index in range(count):
        runner.abort(f"{index}")


def decode_profile(runner: DecoderRunner, count: int, steps: int = 30) -> Profile:
    """`count` requests that generate, each step one token of each."""
    profile = Profile(runner)
    requests(runner, count, 128)
    while any(not sequence.decoding for sequence in (*runner.scheduler.waiting, *runner.scheduler.running)):
        runner.step()
    for _ in range(steps):
        profile.step(count, count, count)
    drop(runner, count)
    return profile


def prefill_profile(runner: DecoderRunner, count: int, times: int = 5) -> Profile:
    """`count` prompts of 128 tokens in one step."""
    profile = Profile(runner)
    for _ in range(times):
        requests(runner, count, 128)
        profile.step(128 * count, count, count)
        drop(runner, count)
    return profile


def table(title: str, profile: Profile, ceilings: dict[str, float]) -> tuple[str, dict[str, float]]:
    """Markdown, and the fraction of the least time of each part and of the whole."""
    assert profile.best is not None
    total, parts = profile.best
    bandwidth, rate = ceilings["read_gb_s"] * 1e9, ceilings["bf16_gflop_s"] * 1e9
    lines = [f"### {title}: {total * 1e3:.2f} ms", ""]
    lines += [
        "| part | us | share | MB | GB/s | GFLOP/s | least, us | of the least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    fractions = {}
    least_total = 0.0
    for name, part in sorted(parts.items(), key=lambda item: -item[1].seconds):
        least = max(part.bytes / bandwidth, part.flops / rate)
        least_total += least
        fractions[name] = least / part.seconds if part.seconds else 0.0
        cells = [f"{part.seconds * 1e6:.0f}", f"{part.seconds / total:.0%}"]
        if part.flops:
            cells += [f"{part.bytes / 1e6:.1f}", f"{part.bytes / part.seconds / 1e9:.1f}"]
            cells += [f"{part.flops / part.seconds / 1e9:.0f}", f"{least * 1e6:.0f}", f"{fractions[name]:.0%}"]
        else:
            cells += [""] * 5
        lines.append(f"| {name} | {' | '.join(cells)} |")
    fractions["whole"] = least_total / total
    lines.append(f"| whole | {total * 1e6:.0f} | 100% | | | | {least_total * 1e6:.0f} | {fractions['whole']:.0%} |")
    return "\n".join(lines), fractions


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", choices=["int8", "int4"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("~/.cache/saccade/benchmarks").expanduser())
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    load, ceilings = machine.load(), machine.ceilings()
    checkpoint = Checkpoint(models.text_model(arguments.folder))
    options = decoder_options(EngineOptions(dtype="bfloat16", max_seqs=32, state_cache="none"), checkpoint)
    options = replace(options, weights=arguments.weights, max_batched_tokens=4096)
    runner = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights())
    sections, summary = [], {}
    for count in (1, 8, 32):
        text, summary[f"decode {count}"] = table(f"Decode, {count} requests", decode_profile(runner, count), ceilings)
        sections.append(text)
    for count in (1, 32):
        text, summary[f"prefill {count}x128"] = table(
            f"Prefill, {count} x 128 tokens", prefill_profile(runner, count), ceilings
        )
        sections.append(text)
    facts = {**machine.describe(), **{k: round(v, 1) for k, v in ceilings.items()}, "load": load}
    page = "\n\n".join(
        [
            "# Where a step's time goes",
            f"Written by `python -m benchmarks.profile {' '.join(sys.argv[1:] if argv is None else argv)}`"
            f" on {datetime.date.today().isoformat()}; see benchmarks/profile.py for what each column is.",
            f"`{json.dumps({**facts, 'threads': arguments.threads, 'weights': arguments.weights or 'bfloat16'})}`",
            *sections,
        ]
    )
    print(page)
    if arguments.write:
        PAGE.write_text(page + "\n")
    print(json.dumps({name: round(fractions["whole"], 3) for name, fractions in summary.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
