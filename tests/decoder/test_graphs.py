"""Steps with graphs draw the same tokens as eager ones, whatever an earlier step has left in the static, padded
buffers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_decoder import image, make_runner, random_weights, request, run, spoil, tiny_config, tokens

from decoder.buffers import BatchBuffers, Field
from decoder.capture import Bucket
from decoder.config import DecoderOptions
from decoder.graphs import DecoderGraphs, graph_bytes
from decoder.request import DecoderRequest
from decoder.runner import DecoderRunner
from decoder.sampling import SamplingParams
from decoder.sequence import Sequence
from decoder.step import Row
from kernels.graphs import ReplayError, StaticGraph

PATTERNS = ["M-*EM*", "MM", "*-*", "ME"]
WEIGHTS = {pattern: dict(random_weights(tiny_config(pattern))) for pattern in PATTERNS}


def workload(count: int = 9) -> list[DecoderRequest]:
    draw, made = random.Random(3), []
    for index in range(count):
        length = draw.choice([1, 2, 9, 16, 17, 33, 50])
        prompt = [draw.randrange(97) for _ in range(length)]
        spans = [image(5, torch.randn(7, 32, generator=torch.Generator().manual_seed(index)))] if length > 12 else []
        params = SamplingParams(max_tokens=4 + index, temperature=float(index % 2), seed=index)
        made.append(request(f"r{index}", prompt, params, spans))
    return made


def answers(pattern: str, *, poison: bool = False, **options: Any) -> tuple[dict[str, list[int]], DecoderRunner]:
    runner = make_runner(tiny_config(pattern), WEIGHTS[pattern], **{"max_len": 66, **options})
    if poison:
        spoil(runner)
    found = run(runner, *workload())
    return {name: tokens(events) for name, events in found.items()}, runner


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_seqs": 3, "max_batched_tokens": 21}, id="small"),
        pytest.param({"max_chunk": 1}, id="chunk-1"),
        pytest.param({"max_chunk": 7, "state_cache": "all", "page_size": 4, "state_block": 4}, id="chunk-7-all"),
        pytest.param({"state_cache": "align", "page_size": 8}, id="align"),
        pytest.param({"max_seqs": 4, "max_capture": 2}, id="few-captured"),
    ],
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_graph_equals_eager(pattern: str, options: dict[str, Any]) -> None:
    eager, plain = answers(pattern, graphs="off", **options)
    replayed, runner = answers(pattern, graphs="on", poison=True, **options)
    assert replayed == eager
    stats = runner.stats()
    replays = sum(count for name, count in stats.items() if name.startswith("replays_"))
    reasons = {name: count for name, count in stats.items() if name.startswith("eager_")}
    assert replays > 0 and replays + sum(reasons.values()) == stats["steps"]
    assert set(reasons) <= {"eager_larger"} and (not reasons or "max_capture" in options)
    assert plain.stats()["eager_off"] == plain.stats()["steps"]
    runner.close()


def test_bfloat16_with_a_float32_residual_stream() -> None:
    config = tiny_config("M-*M", residual_in_fp32=True)
    weights = dict(random_weights(config, dtype=torch.bfloat16))
    found = []
    for graphs in ("off", "on"):
        runner = make_runner(config, weights, graphs=graphs, dtype=torch.bfloat16)
        found.append({n: tokens(e) for n, e in run(runner, *workload()).items()})
    agree = sum(a == b for n in found[0] for a, b in zip(found[0][n], found[1][n], strict=True))
    assert agree >= 0.6 * sum(map(len, found[0].values()))


@pytest.mark.parametrize("host_bytes", [pytest.param(0, id="recompute"), pytest.param(10**9, id="swap")])
def test_preempted_under_graphs(host_bytes: int) -> None:
    eager, _ = answers("M-*EM*", graphs="off")
    runner = make_runner(tiny_config("M-*EM*"), WEIGHTS["M-*EM*"], graphs="on", max_seqs=4, host_bytes=host_bytes)
    spoil(runner)
    found = run(runner, *workload(), preempt_every=3)
    assert {name: tokens(events) for name, events in found.items()} == eager
    assert runner.stats()["preemptions"] > 5


@pytest.mark.parametrize("tokens_per_step", [257, 700])
def test_the_off_stride_maximum_is_captured_and_replayed(tokens_per_step: int) -> None:
    """A step of exactly `max_batched_tokens` replays the largest mixed graph."""
    config = tiny_config("M")
    runner = make_runner(config, graphs="on", max_batched_tokens=tokens_per_step, max_capture=1024, max_len=1024)
    runner.add(request("a", [3] * tokens_per_step, SamplingParams(max_tokens=1)))
    runner.step()
    assert runner.stats()[f"replays_mixed_{tokens_per_step}"] == 1
    assert not [name for name in runner.stats() if name.startswith("eager_")]


def test_fewer_slots_than_rows_is_refused_with_the_number_that_would_work() -> None:
    config = tiny_config("M-*EM*")
    block = make_runner(config).arena.layout.block_bytes
    with pytest.raises(ValueError, match="max_seqs 64 needs 64 state slots .* at most 20, .* requests run at once"):
        make_runner(config, graphs="on", max_seqs=64, memory_bytes=20 * block, max_len=32)


def test_graphs_count_before_the_arena_is_sized() -> None:
    config = tiny_config("M*")
    options = {"max_seqs": 512, "max_len": 2048, "memory_share": 0.002}
    off, on = (make_runner(config, graphs=graphs, **options) for graphs in ("off", "on"))
    taken = graph_bytes(config, on.options)
    assert taken >= on.stats()["graph_bytes"] > 0
    assert off.arena.total_bytes - on.arena.total_bytes == pytest.approx(taken, abs=2 * on.arena.layout.block_bytes)


def test_more_checkpoints_than_a_mixed_graph_holds_run_eagerly_and_are_counted() -> None:
    """Only checkpoints inside rows count; one at a row's end is the row's own state."""
    graphs = graphs_of(make_runner(tiny_config("MM"), graphs="on", state_cache="all", page_size=4, state_block=4))
    row = Row(Sequence(request("a", [1] * 40, SamplingParams(max_tokens=1)), 7, 1), 20, 0)
    bucket = graphs.choose([row], {})
    assert bucket is not None and bucket.kind == "mixed"
    room = graphs.buffers["mixed"].fields["state_saves"].rows(bucket.size)
    inside = [(1 + number % 19, number) for number in range(room + 1)]
    assert graphs.choose([row], {7: [*inside[:room], (20, 99)]}) == bucket
    assert graphs.choose([row], {8: inside, 7: inside[:1]}) == bucket, "of other rows"
    assert not graphs.eager
    assert graphs.choose([row], {7: inside}) is None
    assert graphs.eager == {"checkpoints": 1}


# -- the guard ---------------------------------------------------------------------------------------------------------


def graphs_of(runner: DecoderRunner) -> DecoderGraphs:
    assert runner.forward.graphs is not None
    return runner.forward.graphs


@pytest.mark.parametrize("name", ["slots", "lengths", "x"])
def test_a_replaced_buffer_is_refused(name: str) -> None:
    runner = make_runner(tiny_config("MM"), graphs="on")
    buffers = graphs_of(runner).buffers["decode"]
    buffers.tensors[name] = buffers.tensors[name].clone()
    with pytest.raises(ReplayError, match=f"input {name} was"):
        run(runner, request("a", [1, 2, 3], SamplingParams(max_tokens=3)))


def test_a_moved_arena_is_refused() -> None:
    runner = make_runner(tiny_config("MM"), graphs="on")
    runner.arena.buffer = runner.arena.buffer.clone()
    with pytest.raises(ReplayError, match="input arena was"):
        run(runner, request("a", [1, 2, 3], SamplingParams(max_tokens=3)))


def test_a_closed_runner_replays_nothing() -> None:
    runner = make_runner(tiny_config("MM"), graphs="on")
    graph = graphs_of(runner)._graphs[Bucket("decode", 1)]
    runner.close()
    with pytest.raises(ReplayError, match="not captured"):
        graph.replay(graph.inputs)


@pytest.mark.parametrize("graphs", ["auto", "on"])
def test_a_capture_that_fails_is_an_error_or_a_counted_reason(graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: StaticGraph) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StaticGraph, "capture", refuse)
    monkeypatch.setattr(DecoderOptions, "graphs_on", property(lambda self: True))
    if graphs == "on":
        with pytest.raises(RuntimeError, match="not permitted"):
            make_runner(tiny_config("MM"), graphs=graphs)
        return
    runner = make_runner(tiny_config("MM"), graphs=graphs)
    run(runner, request("a", [1, 2, 3], SamplingParams(max_tokens=3)))
    assert runner.stats()["eager_capture_failed"] == runner.stats()["steps"] == 3


def test_set_batch_leaves_nothing_of_an_earlier_step() -> None:
    fields = {"value": Field((2,), torch.int64, -1), "starts": Field((), torch.int64, None, lambda size: size + 1)}
    buffers = BatchBuffers(fields, 4, "cpu")
    buffers.set_batch(4, {"value": torch.arange(8).view(4, 2), "starts": torch.arange(5)})
    buffers.set_batch(3, {"value": torch.full((1, 2), 9), "starts": torch.tensor([0, 2])})
    view = buffers.view(3)
    assert view["value"].tolist() == [[9, 9], [-1, -1], [-1, -1]]
    assert view["starts"].tolist() == [0, 2, 2, 2]
    assert buffers.view(4)["value"][3].tolist() == [6, 7]
