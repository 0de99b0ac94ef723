"""What the kernels, both runners and the service reach on a GPU, as shares of what the same GPU can do.

    python -m benchmarks.gpu PART ... [--device cuda] [--scale full] [--out DIR]

ceilings  copy bandwidth and bf16 matmul rate: what everything else is held against (measured first with every part)
kernels   each kernel at the sizes of two decoders and a vision tower; beside torch's attention where it does the same
runners   decode steps of an 8B-class model by batch, with the floor (weights + states + KV over bandwidth) and the time
          in which no kernel ran; the vision tower at 8,192 rows; its graphs against eager calls at 1 to 16 pictures
service   a server on the embedded model at 1, 8 and 64 callers: output tokens/s, time to first token; and
          `benchmarks.compare` against transformers on the same GPU, where it knows this family (`make peers`)

Each part leaves DATE-gpu-PART.json in DIR. The last line on stdout is JSON. `--device cpu --scale tiny` proves the
program on any machine, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import gpu_models, gpu_peers, machine
from decoder.config import DecoderOptions
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from encoder.runner import EncoderOptions, EncoderRunner
from kernels.causal_conv1d import causal_conv1d_update
from kernels.chunk_scan import chunk_scan, plan_chunks
from kernels.gated_norm import gated_norm
from kernels.linear import Linear
from kernels.moe import Experts, run_experts
from kernels.paged_attention import decode_attention, extend_attention
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import shuffle_norm
from kernels.rms_norm import add_rms_norm
from kernels.sample import Wishes, sample
from kernels.scan_tables import ScanTables
from kernels.selective_state_update import selective_state_update
from kernels.shapes import NANO_3_OMNI, NANO_V2_12B_VL, ModelShape
from kernels.varlen_attention import varlen_attention

ROOT = Path(__file__).resolve().parent.parent
CACHE_BYTES = 256 << 20
"""Written between timed calls, so that nothing is read from the GPU's cache that a real step would not find there."""


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

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


def timed(setting: Setting, call: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds of a call on the device, with a cold cache."""
    for _ in range(3 if setting.full else 1):
        call()
    if setting.device == "cpu":
        return statistics.median(_wall(call) for _ in range(3))
    flushed = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=setting.device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flushed.zero_()
        start.record()
        call()
        end.record()
    setting.wait()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def _wall(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_ceilings(setting: Setting) -> dict[str, float]:
    """Copy: bytes read and written; matmul: a large square product of random numbers."""
    size, side = setting.pick(4 << 30, 8 << 20), setting.pick(8192, 256)
    source = torch.zeros(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    copy = timed(setting, lambda: target.copy_(source))
    a, b = setting.random(side, side), setting.random(side, side)
    product = timed(setting, lambda: a @ b)
    return {"copy_gb_s": 2 * size / copy / 1e9, "bf16_tflop_s": 2 * side**3 / product / 1e12}


# -- kernels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """One operation: what it moves and computes, and somebody else's call that does the same."""

    name: str
    call: Callable[[], object]
    bytes: float = 0.0
    flops: float = 0.0
    peer: Callable[[], object] | None = None


def kernel_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """The operations of a decoder layer."""
    rows = setting.pick(8192, 16)
    hidden, inner = shape.hidden, shape.mamba_inner
    x, delta, weight = setting.random(rows, hidden), setting.random(rows, hidden), torch.ones(hidden).to(setting.device)
    yield Measure("add_rms_norm", lambda: add_rms_norm(x, delta, weight, 1e-5), bytes=8.0 * rows * hidden)
    y, gate, scale = setting.random(rows, inner), setting.random(rows, inner), torch.ones(inner).to(setting.device)
    group = inner // shape.groups
    yield Measure("gated_norm", lambda: gated_norm(y, gate, scale, group, 1e-5), bytes=6.0 * rows * inner)
    for batch in (1, 32, 64, 256) if setting.full else (2,):
        yield from update_measures(setting, shape, batch)
    yield scan_measure(setting, shape)
    yield from attention_measures(setting, shape)
    if shape.experts:
        yield from expert_measures(setting, shape)
    logits = setting.random(setting.pick(64, 2), shape.vocab if setting.full else 500)
    rows = logits.shape[0]
    whole = torch.zeros(rows, dtype=torch.int64, device=setting.device)
    for name, top_p in (("plain", 1.0), ("top-p", 0.9)):
        reals = [torch.full((rows,), v, dtype=torch.float64, device=setting.device) for v in (1.0, top_p, 0.0)]
        wishes = Wishes(reals[0].float(), whole, reals[1], reals[2], whole, whole, whole)
        yield Measure(f"sample {name}", lambda w=wishes: sample(logits, w), bytes=2.0 * logits.numel())


def update_measures(setting: Setting, shape: ModelShape, batch: int) -> Iterator[Measure]:
    """One token of each row: its state and its window, read and written."""
    heads, width = shape.mamba_heads, shape.mamba_head_dim
    slots = torch.randperm(batch, device=setting.device)
    pool = setting.random(batch, heads, width, shape.state, dtype=torch.float32)
    b, c = (setting.random(batch, shape.groups, shape.state) for _ in range(2))
    x, dt = setting.random(batch, heads, width), setting.random(batch, heads)
    decay, skip, bias = (-torch.rand(heads, device=setting.device) for _ in range(3))
    theirs = gpu_peers.function("mamba-ssm", "ops.triton.selective_state_update", "selective_state_update")
    wide_dt, wide_decay = dt[:, :, None].expand_as(x), decay[:, None, None].expand(heads, width, shape.state)
    wide_skip, wide_bias = (value[:, None].expand(heads, width) for value in (skip, bias))

    def peer() -> object:
        assert theirs is not None
        return theirs(pool, x, wide_dt, wide_decay, b, c, wide_skip, None, wide_bias, True, slots)

    yield Measure(
        f"selective_state_update b{batch}",
        lambda: selective_state_update(pool, slots, x, dt, decay, b, c, skip, bias),
        bytes=8.0 * pool.numel(),
        peer=None if theirs is None else peer,
    )
    windows = setting.random(batch, shape.conv - 1, shape.conv_channels)
    taps, new = setting.random(shape.conv, shape.conv_channels, dtype=torch.float32), windows[:, 0].contiguous()
    yield Measure(
        f"causal_conv1d_update b{batch}",
        lambda: causal_conv1d_update(new, taps, None, windows, slots),
        bytes=4.0 * windows.numel() + 4.0 * new.numel(),
    )


def scan_measure(setting: Setting, shape: ModelShape) -> Measure:
    """Four sequences, from nothing to a state each."""
    rows, length, chunk = 4, setting.pick(2048, 24), setting.pick(shape.chunk, 8)
    heads, width, groups, state = shape.mamba_heads, shape.mamba_head_dim, shape.groups, shape.state
    tokens = rows * length
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    x = setting.random(tokens, heads, width, dtype=dtype)
    b, c = (setting.random(tokens, groups, state, dtype=dtype) for _ in range(2))
    dt = torch.rand(tokens, heads, device=setting.device) / 10
    decay, skip = (-torch.rand(heads, device=setting.device) for _ in range(2))
    pool = setting.random(rows, heads, width, state, dtype=torch.float32)
    slots, fresh = torch.arange(rows, device=setting.device), torch.zeros(rows, dtype=torch.bool).to(setting.device)
    lengths, computed = [length] * rows, [0] * rows
    chunks = plan_chunks(lengths, computed, chunk)
    tables = ScanTables.of(lengths, computed, chunk, device=setting.device)
    combined = gpu_peers.function("mamba-ssm", "ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    apart = [value.view(rows, length, *value.shape[1:]) for value in (x, dt, b, c)]
    inside = chunk * (groups * state + heads * width)
    return Measure(
        f"chunk_scan {tokens}",
        lambda: chunk_scan(pool, slots, fresh, x, dt, decay, b, c, skip, chunks, (), tables),
        flops=float(tokens * (inside + 4 * heads * width * state)),
        peer=None if combined is None else lambda: combined(
            apart[0], apart[1], decay, apart[2], apart[3], chunk, D=skip, return_final_states=True
        ),
    )  # fmt: skip


def attention_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """Decode at two lengths, and a prompt beside torch's fused attention."""
    heads, kv_heads, width, scale = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5
    for rows, length in ((64, 4096), (1, 131072)) if setting.full else ((2, 40),):
        pages = -(-length // 16)
        pool = setting.random(rows * pages, 2, 16, kv_heads, width)
        tables = torch.randperm(rows * pages, device=setting.device).view(rows, pages)
        q, lengths = setting.random(rows, heads, width), torch.full((rows,), length, device=setting.device)
        yield Measure(
            f"decode_attention b{rows} {length}",
            lambda length=length, lengths=lengths, pool=pool, q=q, tables=tables: decode_attention(
                q, pool, tables, lengths, scale, length
            ),
            bytes=4.0 * rows * length * kv_heads * width,
        )
    tokens = setting.pick(8192, 40)
    q, k, v = (setting.random(tokens, n, width) for n in (heads, kv_heads, kv_heads))
    pages = -(-tokens // 16)
    pool, tables = setting.random(pages, 2, 16, kv_heads, width), torch.arange(pages, device=setting.device)[None]
    zero, starts = torch.zeros(1, dtype=torch.int64), torch.tensor([0, tokens])
    zero, starts = zero.to(setting.device), starts.to(setting.device)
    dense = [t.transpose(0, 1)[None] for t in (q, k, v)]
    yield Measure(
        f"extend_attention prompt {tokens}",
        lambda: extend_attention(q, k, v, pool, tables, zero, starts, scale),
        flops=2.0 * tokens * tokens * heads * width,
        peer=lambda: F.scaled_dot_product_attention(*dense, is_causal=True, scale=scale, enable_gqa=True),
    )


def expert_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """The mixture at one token, a decode batch and a prompt. Bytes: experts that anybody chose."""
    count, width, inner = shape.experts, setting.pick(shape.hidden, 64), setting.pick(shape.intermediate, 48)
    experts = Experts(setting.random(count, inner, width), setting.random(count, width, inner))
    for tokens in (1, 64, 4096) if setting.full else (2,):
        x = setting.random(tokens, width)
        ids = torch.rand(tokens, count, device=setting.device).topk(shape.experts_per_token)[1]
        shares = torch.rand(tokens, shape.experts_per_token, device=setting.device)
        touched = int(ids.unique().numel())
        yield Measure(
            f"run_experts {tokens}",
            lambda ids=ids, shares=shares, x=x: run_experts(x, ids, shares, experts),
            bytes=4.0 * touched * inner * width,
            flops=4.0 * ids.numel() * inner * width,
        )


def tower_measures(setting: Setting, shape: ModelShape) -> Iterator[Measure]:
    """The operations of the vision tower, on pictures of 1,024 patches and ten prefix rows."""
    pictures, patches = setting.pick(8, 2), setting.pick(1024, 16)
    heads, hidden = shape.vit_heads, shape.vit_hidden
    width, length = hidden // heads, patches + 10
    q, k, v = setting.random(pictures * length, 3, heads, width).unbind(1)
    bounds = torch.arange(0, pictures * length + 1, length, dtype=torch.int32, device=setting.device)
    dense = [t.reshape(pictures, length, heads, width).transpose(1, 2) for t in (q, k, v)]
    yield Measure(
        "varlen_attention",
        lambda: varlen_attention(q, k, v, bounds, length, scale=width**-0.5),
        flops=4.0 * pictures * length**2 * hidden,
        peer=lambda: F.scaled_dot_product_attention(*dense, scale=width**-0.5),
    )
    depth, total = 3 * shape.patch**2, pictures * patches
    given, places = setting.random(total, depth), setting.random(total, hidden)
    projection, table = Linear(setting.random(hidden, depth)), setting.random(11, hidden)
    source = torch.arange(11, 11 + total, device=setting.device)
    moved = 2.0 * (total * depth + hidden * depth + 2 * total * hidden)
    yield Measure(
        "patch_embed",
        lambda: patch_embed(given, projection, places, table, source),
        bytes=moved,
        flops=2.0 * total * depth * hidden,
    )
    rows, order = setting.random(total, hidden), torch.randperm(total, device=setting.device).view(-1, 4)
    weight = torch.ones(4 * hidden, device=setting.device)
    yield Measure("shuffle_norm", lambda: shuffle_norm(rows, order, weight, 1e-5), bytes=4.0 * total * hidden)


def part_kernels(setting: Setting, ceilings: dict[str, float]) -> dict[str, Any]:
    """By model, then by operation: seconds, shares of the ceilings, and how many times faster than the peer."""
    found: dict[str, Any] = {}
    for shape in (NANO_V2_12B_VL, NANO_3_OMNI):
        small = replace(shape, hidden=64, mamba_heads=8, mamba_head_dim=8, state=16, heads=4, kv_heads=2, head_dim=16)
        chosen = (
            shape
            if setting.full
            else replace(small, vit_hidden=64, vit_heads=2, patch=4, experts=min(8, shape.experts))
        )
        sources = [kernel_measures(setting, chosen)]
        if shape is NANO_3_OMNI:
            sources.append(tower_measures(setting, chosen))
        for measure in (measure for source in sources for measure in source):
            seconds = timed(setting, measure.call)
            row = {"seconds": seconds}
            if measure.bytes:
                row["share_of_copy"] = measure.bytes / seconds / 1e9 / ceilings["copy_gb_s"]
            if measure.flops:
                row["share_of_matmul"] = measure.flops / seconds / 1e12 / ceilings["bf16_tflop_s"]
            if measure.peer is not None:
                row["times_the_peer"] = timed(setting, measure.peer) / seconds
            found[f"{shape.name} {measure.name}"] = row
            print(f"{shape.name} {measure.name}: {row}", file=sys.stderr, flush=True)
    return found


# -- runners -----------------------------------------------------------------------------------------------------------


def part_runners(setting: Setting, ceilings: dict[str, float]) -> dict[str, Any]:
    """Decode steps, the tower's rate, and graphs against eager calls."""
    found = {"decode": decode_steps(setting, ceilings)}
    if setting.device != "cpu":
        torch.cuda.empty_cache()
    return found | {"tower": tower_rate(setting, ceilings), "pictures": pictures_by_graph(setting)}


def decode_steps(setting: Setting, ceilings: dict[str, float]) -> dict[str, Any]:
    """By batch: milliseconds of a step, its floor, their ratio, and the share in which no kernel ran."""
    config, batches = gpu_models.decoder(setting.scale), (1, 8, 64, 256) if setting.full else (1, 2)
    prompt, steps, device = setting.pick(256, 8), setting.pick(20, 2), setting.device
    options = DecoderOptions(
        dtype=torch.bfloat16, device=device, max_seqs=max(batches), max_len=1024, max_batched_tokens=8192,
        state_cache="none", graphs="on", max_capture=max(batches),
    )  # fmt: skip
    runner = DecoderRunner(config, options, gpu_models.weights(config.expected_weights(), device, torch.bfloat16))
    shapes = config.expected_weights()
    weight_bytes = sum(2 * torch.Size(shape).numel() for name, shape in shapes.items() if "embeddings" not in name)
    layout = runner.arena.layout
    found = {}
    for batch in batches:
        for index in range(batch):
            ids = [(7 * index + 3 * place) % config.vocab_size for place in range(prompt)]
            asked = SamplingParams(max_tokens=700, temperature=0.0, ignore_eos=True)
            runner.add(DecoderRequest(f"{batch}-{index}", ids, asked))
        seen: set[str] = set()
        while len(seen) < batch:
            seen |= {event.request_id for event in runner.step()}
        for _ in range(3):
            runner.step()
        setting.wait()
        seconds = statistics.median(_wall(runner.step) for _ in range(steps))
        kv = config.attention_layers * 4 * config.kv_heads * config.head_dim * (prompt + 8)
        moved = weight_bytes + batch * (2 * layout.slot_bytes + kv)
        floor = moved / (ceilings["copy_gb_s"] * 1e9)
        found[str(batch)] = {
            "step_ms": seconds * 1e3,
            "floor_ms": floor * 1e3,
            "over_floor": seconds / floor,
            "idle_share": idle_share(setting, runner),
        }
        print(f"decode batch {batch}: {found[str(batch)]}", file=sys.stderr, flush=True)
        for index in range(batch):
            runner.abort(f"{batch}-{index}")
    stats = runner.stats()
    runner.close()
    return found | {"graphs": {name: value for name, value in stats.items() if "replays" in name or "eager" in name}}


def idle_share(setting: Setting, runner: DecoderRunner, steps: int = 4) -> float | None:
    """Share of the wall time of some steps in which no kernel ran: launch gaps and host work."""
    if setting.device == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        setting.wait()
        wall = _wall(lambda: [runner.step() for _ in range(steps)])
    busy = sum(event.self_device_time_total for event in trace.key_averages()) / 1e6
    return max(0.0, 1 - busy / wall)


def tower_rate(setting: Setting, ceilings: dict[str, float]) -> dict[str, float]:
    """The whole tower over pictures that make 8,192 rows of patches, in one launch."""
    config = gpu_models.tower(setting.scale)
    side, count = setting.pick(32, 4), setting.pick(8, 2)
    runner, images, out = encoder(setting, "off", [(side, side)] * count)
    runner.encode(images, out)
    setting.wait()
    seconds = statistics.median(_synchronised(setting, lambda: runner.encode(images, out)) for _ in range(5))
    runner.close()
    rows, hidden, inner = count * (side**2 + config.num_prefix_tokens), config.hidden_size, config.intermediate_size
    layers = config.num_layers * (2 * rows * (4 * hidden**2 + 2 * hidden * inner) + 4 * rows * (rows // count) * hidden)
    merged = rows // 4 * 2 * config.projector_hidden_size * (4 * hidden + config.text_hidden_size)
    rate = (layers + merged) / seconds / 1e12
    return {"rows": rows, "seconds": seconds, "tflop_s": rate, "share_of_matmul": rate / ceilings["bf16_tflop_s"]}


def encoder(setting: Setting, graphs: str, grids: list[tuple[int, int]]) -> tuple[EncoderRunner, list[Any], list[Any]]:
    """A runner with one budget for exactly these pictures, the pictures, and where their rows go."""
    config = gpu_models.tower(setting.scale)
    tokens = sum(rows * columns for rows, columns in grids) // config.merge_size**2
    options = EncoderOptions(
        dtype=torch.bfloat16, device=torch.device(setting.device), graphs=graphs, token_budgets=(tokens,),
        max_images=len(grids), max_tokens_per_step=max(tokens, config.max_image_tokens),
    )  # fmt: skip
    weights = gpu_models.weights(config.expected_weights(), setting.device, torch.bfloat16)
    images = [gpu_models.picture(config, *grid, torch.bfloat16, seed) for seed, grid in enumerate(grids)]
    shape = (config.text_hidden_size,)
    out = [torch.empty(image.tokens, *shape, dtype=torch.bfloat16, device=setting.device) for image in images]
    return EncoderRunner(config, options, weights), images, out


def pictures_by_graph(setting: Setting) -> dict[str, Any]:
    """Mean and 99th percentile, in milliseconds, of encoding 1 to 16 pictures, by graph and eagerly in turn."""
    found = {}
    repeats = setting.pick(40, 2)
    for count in (1, 2, 4, 8, 16) if setting.full else (1, 2):
        grids = [(32, 32) if setting.full else (4, 4)] * count
        sides = {graphs: encoder(setting, graphs, grids) for graphs in ("on", "off")}
        times: dict[str, list[float]] = {graphs: [] for graphs in sides}
        for _ in range(repeats + 2):
            for graphs, (runner, images, out) in sides.items():
                call = lambda r=runner, i=images, o=out: r.encode(i, o)  # noqa: E731
                times[graphs].append(_synchronised(setting, call) * 1e3)
        row = {}
        for graphs, name in (("on", "graph"), ("off", "eager")):
            kept = sorted(times[graphs][2:])
            row |= {f"{name}_mean_ms": statistics.fmean(kept), f"{name}_p99_ms": kept[int(0.99 * (len(kept) - 1))]}
            sides[graphs][0].close()
        found[str(count)] = row | {"eager_over_graph": row["eager_mean_ms"] / row["graph_mean_ms"]}
    return found


def _synchronised(setting: Setting, call: Callable[[], object]) -> float:
    def whole() -> None:
        call()
        setting.wait()

    return _wall(whole)


# -- service -----------------------------------------------------------------------------------------------------------


def part_service(setting: Setting, ceilings: dict[str, float]) -> dict[str, Any]:
    """The embedded model by callers, then the side-by-side with transformers."""
    import saccade
    from service.cli import ServerProcess

    found: dict[str, Any] = {}
    arguments = ["demo", "--device", setting.device, "--dtype", "bfloat16", "--max-seqs", "64", "--log-level", "error"]
    picture, new = ROOT / "demo/pictures/shapes.png", setting.pick(64, 4)
    with ServerProcess(arguments) as server, saccade.Client(server.address) as client:

        def ask(seed: int, images: Sequence[Path] = (picture,)) -> tuple[float, int]:
            started, first, tokens = time.perf_counter(), 0.0, 0
            stream = client.stream(
                "What does the picture show?",
                images=images,
                max_tokens=new,
                ignore_eos=True,
                temperature=1.0,
                seed=seed,
            )
            for delta in stream:
                first = first or time.perf_counter() - started
                tokens += len(delta.token_ids)
            return first, tokens

        ask(0)
        for callers in (1, 8, 64) if setting.full else (1, 2):
            rounds, lock, firsts = setting.pick(4, 1), threading.Lock(), list[float]()

            def caller(seed: int, rounds: int = rounds, firsts: list[float] = firsts, lock: Any = lock) -> int:
                total = 0
                for turn in range(rounds):
                    first, tokens = ask(1000 * turn + seed)
                    total += tokens
                    with lock:
                        firsts.append(first)
                return total

            with ThreadPoolExecutor(callers) as pool:
                started = time.perf_counter()
                tokens = sum(pool.map(caller, range(callers)))
                seconds = time.perf_counter() - started
            ordered = sorted(firsts)
            found[str(callers)] = {
                "tokens_per_second": tokens / seconds,
                "first_token_p50_ms": ordered[len(ordered) // 2] * 1e3,
                "first_token_p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
            }
            print(f"service at {callers}: {found[str(callers)]}", file=sys.stderr, flush=True)
    return {"demo": found, "transformers": side_by_side(setting)}


def side_by_side(setting: Setting) -> Any:
    """`benchmarks.compare` on this GPU: its last line; or why it was not run."""
    if not setting.full:
        return "left out at this scale"
    try:
        import transformers.models.nemotron_h_omni  # noqa: F401
    except ImportError as error:
        return f"this transformers does not know the family ({error}): run `make peers` first"
    command = [sys.executable, "-m", "benchmarks.compare", "--peer", "transformers", "--rounds", "1"]
    ran = subprocess.run([*command, "--folder", "/tmp/saccade-benchmarks"], cwd=ROOT, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"benchmarks.compare ended with {ran.returncode}: {ran.stderr[-4000:]}")
    return ran.stdout.splitlines()


PARTS: dict[str, Callable[[Setting, dict[str, float]], dict[str, Any]]] = {
    "ceilings": lambda setting, ceilings: {},
    "kernels": part_kernels,
    "runners": part_runners,
    "service": part_service,
}


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """0; a part that cannot run raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="PART", choices=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build")))
    arguments = parser.parse_args(argv)
    if arguments.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: no GPU is found; --device cpu --scale tiny needs none")
    setting = Setting(arguments.device, arguments.scale)
    arguments.out.mkdir(parents=True, exist_ok=True)
    ceilings = measure_ceilings(setting)
    print(f"ceilings: {ceilings}", file=sys.stderr, flush=True)
    results = []
    for name in arguments.parts:
        started = time.perf_counter()
        result = {
            "benchmark": f"gpu-{name}", "scale": arguments.scale, "machine": machine.describe() | machine.gpu(),
            "ceilings": ceilings, **PARTS[name](setting, ceilings), "seconds": 0.0,
        }  # fmt: skip
        result["seconds"] = round(time.perf_counter() - started, 1)
        path = arguments.out / f"{datetime.date.today():%Y-%m-%d}-gpu-{name}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        results.append(result)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
