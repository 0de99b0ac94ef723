"""Time of the parts of a decode step and of a prefill, compared with the lower bound on this machine.

    python -m benchmarks.profile [--family qwen3_5] [--only decode,prefill] [--weights int8] [--activations int8]
                                 [--state-dtype bfloat16] [--threads N] [--rough] [--write]

Runs the decoder in this process on the family's text model of `benchmarks.workloads`. The operations of the compiled
step are called one at a time, which adds a few microseconds to each. The lower bound of a part is the larger of its
bytes over the measured bandwidth and its FLOPs over the measured rate of large products of bfloat16. The bytes include
reads and writes of recurrent states; these advance by blocks of 16 tokens, so a step counts the average per token.
`--write` writes docs/profile.md, or docs/profile-FAMILY.md. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.floors import BLOCK_STATE_BYTES
from benchmarks.record import FOLDER
from benchmarks.workloads import SUBJECTS, prompt_sizes
from decoder.config import ACTIVATION_KINDS, WEIGHT_KINDS
from decoder.layers.attention import AttentionMixer
from decoder.layers.build import BuiltLayer
from decoder.layers.gated_delta import GatedDeltaMixer
from decoder.layers.mamba2 import Mamba2Mixer
from decoder.layers.mlp import GatedMlpMixer, MlpMixer
from decoder.layers.short_conv import ShortConvMixer
from decoder.native import NativeStep
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from kernels.cores import available_cores
from kernels.linear import Packed
from kernels.native.structs import Code, DeltaShape, Kind, Op
from service.common.config import EngineOptions
from service.common.helper_process import SPINNING
from service.engine.runner_options import decoder_options
from service.model.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parent.parent
BITS = {
    Kind.F32: 32,
    Kind.BF16: 16,
    Kind.COMPACT_BF16: 12,
    Kind.INT8: 8,
    Kind.INT4: 4,
    Kind.FP8: 8,
    Kind.NVFP4: 4.5,
    Kind.UINT4: 4,
    Kind.UINT8: 8,
}
BYTE_ROWS = (Kind.BYTES, Kind.SUMMED_BYTES)


@dataclass
class Part:
    """One kind of operation, over all layers of a step."""

    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    bf16_flops: float = 0.0
    """FLOPs of bfloat16 that take as long: products of bytes count half."""


OPERATIONS = {
    Code.MAMBA: "Mamba: convolution, state, gated norm", Code.DELTA: "delta rule: convolution, state, gated norm",
    Code.ATTENTION: "attention over pages", Code.EXPERTS: "experts", Code.HEADS: "norms and rotation of heads",
    Code.LARGEST: "largest logits", Code.SHORT_CONV: "short convolution",
}  # fmt: skip
PRODUCTS = {
    Mamba2Mixer: "Mamba", GatedDeltaMixer: "delta rule", ShortConvMixer: "short convolution",
    AttentionMixer: "attention", MlpMixer: "MLP",
    GatedMlpMixer: "MLP",
}  # fmt: skip


class Names:
    """The part of the model that an operation belongs to."""

    def __init__(self, native: NativeStep, layers: Sequence[BuiltLayer]) -> None:
        self._vocab = native.config.vocab_size
        self._of: dict[int, str] = {}
        """By the address of a weight."""
        for mixer in (mixer for layer in layers for mixer in layer.mixers):
            for linear in vars(mixer).values():
                packed = getattr(linear, "packed", None)
                if isinstance(packed, Packed):
                    self._of[packed.descriptor.data] = PRODUCTS.get(type(mixer), "other")

    def of(self, op: Op) -> str:
        if op.code != Code.LINEAR:
            return OPERATIONS.get(Code(op.code), "norms, activations, conversions")
        if op.weight.n == self._vocab:
            return "vocabulary projection"
        return f"{self._of.get(op.weight.data, 'other')} projections"


def cost_of(op: Op, native: NativeStep, tokens: int, rows: int) -> tuple[float, float]:
    """The minimal (bytes, FLOPs) of an operation. Mamba-2: a product that reads the state and one that updates it; the
    delta rule: two products that read the state and one that updates it."""
    if op.code == Code.LINEAR:
        size = op.weight.n * op.weight.k
        return size * BITS[Kind(op.weight.kind)] / 8, 2.0 * size * tokens
    if op.code == Code.MAMBA:
        state = native.mamba.inner * native.mamba.ssm_state_size
        return BLOCK_STATE_BYTES * state * rows, 4.0 * state * tokens
    if op.code == Code.DELTA:
        shape = ctypes.cast(op.delta, ctypes.POINTER(DeltaShape)).contents
        state = shape.heads * shape.key * shape.value
        return BLOCK_STATE_BYTES * state * rows, 6.0 * state * tokens
    return 0.0, 0.0


class Profile:
    """The parts of one kind of step: the fastest of several."""

    def __init__(self, runner: DecoderRunner) -> None:
        self.runner = runner
        assert runner.model.native is not None, "this machine has no compiled step to take apart"
        self.names = Names(runner.model.native, runner.model.trunk.layers)
        self.best: tuple[float, dict[str, Part]] | None = None

    def step(self, rows: int) -> None:
        """One step with this many rows."""
        native = self.runner.model.native
        assert native is not None
        parts: dict[str, Part] = defaultdict(Part)

        def hear(op: Op, tokens: int, seconds: float) -> None:
            part = parts[self.names.of(op)]
            amount, flops = cost_of(op, native, tokens, rows)
            part.seconds += seconds
            part.bytes += amount
            part.flops += flops
            part.bf16_flops += flops / (2 if op.code == Code.LINEAR and op.weight.operand in BYTE_ROWS else 1)

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
    words = runner.config.vocab_size - 1
    for index in range(count):
        prompt = [rng.randrange(3, words) for _ in range(length)]
        params = SamplingParams(max_tokens=512, temperature=0, ignore_eos=True)
        runner.add(DecoderRequest(f"{index}", prompt, params))


def drop(runner: DecoderRunner, count: int) -> None:
    for index in range(count):
        runner.abort(f"{index}")


def decode_profile(runner: DecoderRunner, count: int, steps: int = 30) -> Profile:
    """`count` requests that generate; each step computes one token of each."""
    profile = Profile(runner)
    requests(runner, count, 128)
    while any(not sequence.decoding for sequence in (*runner.scheduler.waiting, *runner.scheduler.running)):
        runner.step()
    for _ in range(steps):
        profile.step(count)
    drop(runner, count)
    return profile


def prefill_profile(runner: DecoderRunner, count: int, length: int, times: int = 5) -> Profile:
    """`count` prompts of `length` tokens in one step."""
    profile = Profile(runner)
    for _ in range(times):
        requests(runner, count, length)
        profile.step(count)
        drop(runner, count)
    return profile


def table(title: str, profile: Profile, ceilings: dict[str, float]) -> tuple[str, dict[str, float]]:
    """Markdown, and the lower bound as a fraction of the measured time, for each part and for the whole."""
    assert profile.best is not None
    total, parts = profile.best
    bandwidth, rate = ceilings["read_gb_s"] * 1e9, ceilings["bf16_gflop_s"] * 1e9
    lines = [f"### {title}: {total * 1e3:.2f} ms", ""]
    lines += [
        "| part | us | share | MB | GB/s | GFLOP/s | roofline, us | share of the roofline |",
        "|---|---|---|---|---|---|---|---|",
    ]
    fractions = {}
    least_total = 0.0
    for name, part in sorted(parts.items(), key=lambda item: -item[1].seconds):
        least = max(part.bytes / bandwidth, part.bf16_flops / rate)
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
    parser.add_argument("--family", choices=list(SUBJECTS), default="nemotron_h")
    parser.add_argument("--only", default="decode,prefill", help="comma-separated kinds of steps")
    parser.add_argument("--concurrent", default="1,8,32", help="requests of the decode steps")
    parser.add_argument("--prompts", type=prompt_sizes, help="prefill steps: comma-separated PROMPTSxTOKENS")
    parser.add_argument("--steps", type=int, default=30, help="decode steps; the fastest counts")
    parser.add_argument("--weights", choices=WEIGHT_KINDS)
    parser.add_argument("--activations", choices=ACTIVATION_KINDS)
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=available_cores().usable)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--write", action="store_true", help="write the page under docs")
    machine.add_rough(parser)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    before, ceilings = machine.before(), machine.ceilings(rough=arguments.rough)
    subject = SUBJECTS[arguments.family]
    checkpoint = Checkpoint(subject.text(arguments.folder))
    given = EngineOptions(dtype="bfloat16", max_seqs=32, state_cache="none", state_dtype=arguments.state_dtype)
    options = decoder_options(given, checkpoint)
    options = replace(options, weights=arguments.weights, activations=arguments.activations, max_batched_tokens=4096)
    runner = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights())
    sections, summary = [], {}
    decodes = [int(count) for count in arguments.concurrent.split(",")] if "decode" in arguments.only else []
    for count in decodes:
        profile = decode_profile(runner, count, arguments.steps)
        text, summary[f"decode {count}"] = table(f"Decode, {count} requests", profile, ceilings)
        sections.append(text)
    for count, length in arguments.prompts or subject.prompts if "prefill" in arguments.only else ():
        if count * length > options.max_batched_tokens:
            continue
        profile = prefill_profile(runner, count, length)
        text, summary[f"prefill {count}x{length}"] = table(f"Prefill, {count} x {length} tokens", profile, ceilings)
        sections.append(text)
    facts = {**machine.describe(), **{k: round(v, 1) for k, v in ceilings.items()}, "load": before.load}
    weights = "+".join(filter(None, (arguments.weights or "bfloat16", arguments.activations)))
    page = "\n\n".join(
        [
            "# Where a step's time goes",
            f"This page divides the time of decoder steps of the {arguments.family} benchmark model among their parts. "
            "The roofline time of a part is its bytes over the measured bandwidth or its operations over the measured "
            "rate, whichever is larger; above 100%, the machine was faster than when these were measured.",
            f"Written by `python -m benchmarks.profile {' '.join(sys.argv[1:] if argv is None else argv)}`"
            f" on {datetime.date.today().isoformat()}; benchmarks/profile.py describes each column.",
            f"`{json.dumps({**facts, 'threads': arguments.threads, 'weights': weights, 'states': given.state_dtype})}`",
            *sections,
        ]
    )
    print(page)
    if arguments.write:
        family = "" if arguments.family == "nemotron_h" else f"-{arguments.family}"
        (ROOT / "docs" / f"profile{family}.md").write_text(page + "\n")
    print(json.dumps({name: round(fractions["whole"], 3) for name, fractions in summary.items()}))
    return 0


if __name__ == "__main__":
    # As the engine process: threads of libgomp that spin after a torch operation take time from the compiled step.
    machine.restart_with(SPINNING)
    sys.exit(main())
