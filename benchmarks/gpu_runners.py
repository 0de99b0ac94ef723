"""The part `runners` of `benchmarks.gpu`: decode steps against their lower bound, the tower's rate, graphs against
eager calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import gpu_models, machine
from benchmarks.gpu_setting import Record, Setting, wall
from decoder.config import DecoderOptions
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from encoder.runner import EncoderOptions, EncoderRunner


def part_runners(setting: Setting, ceilings: dict[str, float], record: Record) -> None:
    """Measures decode steps, the tower's rate, and graphs against eager calls."""
    decode_steps(setting, ceilings, record)
    if setting.device != "cpu":
        torch.cuda.empty_cache()
    record.take("", "tower", lambda: tower_rate(setting, ceilings))
    for count in (1, 2, 4, 8, 16) if setting.full else (1, 2):
        record.take("images", str(count), partial(images_by_graph, setting, count))


def decode_steps(setting: Setting, ceilings: dict[str, float], record: Record) -> None:
    """By batch size: milliseconds per step, the lower bound, their ratio, and the share of time in which no kernel
    ran."""
    batches = (1, 8, 64, 256) if setting.full else (1, 2)
    made: list[DecoderRunner] = []
    record.take("decode", "start_seconds", lambda: wall(lambda: made.append(decoder(setting, max(batches)))))
    if not made:
        return
    runner = made[0]
    for batch in batches:
        record.take("decode", str(batch), partial(decode_step, setting, ceilings, runner, batch))
    stats = runner.stats()
    counted = {name: value for name, value in stats.items() if "replays" in name or "eager" in name or "graph" in name}
    record.take("decode", "graphs", lambda: counted)
    runner.close()


def decoder(setting: Setting, most: int) -> DecoderRunner:
    """The 8B-class decoder with graphs for up to `most` requests."""
    config = gpu_models.decoder(setting.scale)
    options = DecoderOptions(
        dtype=torch.bfloat16, device=setting.device, max_seqs=most, max_len=1024, max_batched_tokens=8192,
        state_cache="none", graphs="on", max_capture=most,
    )  # fmt: skip
    weights = gpu_models.weights(config.expected_weights(), setting.device, torch.bfloat16)
    return DecoderRunner(config, options, weights)


def decode_step(setting: Setting, ceilings: dict[str, float], runner: DecoderRunner, batch: int) -> dict[str, Any]:
    """Times steps of `batch` requests whose prompts have been computed; then cancels them."""
    config, prompt = runner.config, setting.pick(256, 8)
    names = [f"{batch}-{index}" for index in range(batch)]
    for index, name in enumerate(names):
        ids = [(7 * index + 3 * place) % config.vocab_size for place in range(prompt)]
        runner.add(DecoderRequest(name, ids, SamplingParams(max_tokens=700, temperature=0.0, ignore_eos=True)))
    try:
        seen: set[str] = set()
        while len(seen) < batch:
            seen |= {event.request_id for event in runner.step()}
        for _ in range(3):
            runner.step()
        setting.wait()
        seconds = statistics.median(wall(runner.step) for _ in range(setting.pick(20, 2)))
        idle = idle_share(setting, runner)
    finally:
        for name in names:
            runner.abort(name)
    shapes, layout = config.expected_weights(), runner.arena.layout
    weights = sum(2 * torch.Size(shape).numel() for name, shape in shapes.items() if "embeddings" not in name)
    kv = sum(2 * page.numbers(prompt + 8) for page in config.pages)
    floor = (weights + batch * (2 * layout.slot_bytes + kv)) / (ceilings["copy_gb_s"] * 1e9)
    return {
        "step_ms": seconds * 1e3, "floor_ms": floor * 1e3, "over_floor": seconds / floor, "idle_share": idle,
    }  # fmt: skip


def idle_share(setting: Setting, runner: DecoderRunner, steps: int = 4) -> float | None:
    """Share of the wall time of a few steps in which no kernel ran: launch gaps and host work."""
    if setting.device == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        setting.wait()
        took = wall(lambda: [runner.step() for _ in range(steps)])
    busy = sum(event.self_device_time_total for event in trace.key_averages()) / 1e6
    return max(0.0, 1 - busy / took)


def tower_rate(setting: Setting, ceilings: dict[str, float]) -> dict[str, float]:
    """Rate of the whole tower for images with 8,192 rows of patches in one launch."""
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
    """A runner with one budget for exactly these images, the images, and the places of their rows."""
    config = gpu_models.tower(setting.scale)
    tokens = sum(rows * columns for rows, columns in grids) // config.merge_size**2
    options = EncoderOptions(
        dtype=torch.bfloat16, device=torch.device(setting.device), graphs=graphs, token_budgets=(tokens,),
        max_images=len(grids), max_tokens_per_step=max(tokens, config.max_image_tokens),
    )  # fmt: skip
    weights = gpu_models.weights(config.expected_weights(), setting.device, torch.bfloat16)
    images = [gpu_models.noise_image(config, *grid, torch.bfloat16, seed) for seed, grid in enumerate(grids)]
    shape = (config.text_hidden_size,)
    out = [torch.empty(image.tokens, *shape, dtype=torch.bfloat16, device=setting.device) for image in images]
    return EncoderRunner(config, options, weights), images, out


def images_by_graph(setting: Setting, count: int) -> dict[str, float]:
    """Mean and 99th percentile, in milliseconds, of encoding `count` images, alternately by graph and eagerly."""
    grids = [(32, 32) if setting.full else (4, 4)] * count
    sides = {graphs: encoder(setting, graphs, grids) for graphs in ("on", "off")}
    times: dict[str, list[float]] = {graphs: [] for graphs in sides}
    for _ in range(setting.pick(40, 2) + 2):
        for graphs, (runner, images, out) in sides.items():
            times[graphs].append(_synchronised(setting, partial(runner.encode, images, out)) * 1e3)
    row: dict[str, float] = {}
    for graphs, name in (("on", "graph"), ("off", "eager")):
        kept = times[graphs][2:]
        row |= {f"{name}_mean_ms": statistics.fmean(kept), f"{name}_p99_ms": machine.percentile(kept, 0.99)}
        sides[graphs][0].close()
    return row | {"eager_over_graph": row["eager_mean_ms"] / row["graph_mean_ms"]}


def _synchronised(setting: Setting, call: Callable[[], object]) -> float:
    def whole() -> None:
        call()
        setting.wait()

    return wall(whole)
