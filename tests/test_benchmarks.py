"""What benchmarks compute themselves: the lower bound of a workload's time."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_decoder import greedy_params, request, run, tiny_config, tokens

from benchmarks import bookkeeping, large_checkpoint, machine, sized_models
from benchmarks.compare import Measured, length_options, typical
from benchmarks.floors import Floor, Machine, Tower
from benchmarks.machine import ProcessorTime
from benchmarks.round_trip import round_trip
from benchmarks.sides import Timed
from benchmarks.workloads import SUBJECTS, Workload, workloads
from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.descriptions import Attention, Experts, Mlp
from decoder.layers.recurrent_descriptions import GatedDelta
from decoder.layers.spec import Layer
from decoder.runner import DecoderRunner
from kernels.linear import Quantised
from service.model.checkpoint import Checkpoint
from service.model.modelconfig import load_config

MACHINE = Machine(flops=1e12, bandwidth=1e10)


def matrices(config: DecoderConfig) -> int:
    """Number of weights in all products except the output projection, counted from the checkpoint's shapes."""
    return sum(
        shape[0] * shape[1]
        for name, shape in config.expected_weights().items()
        if len(shape) == 2 and "layers" in name and "experts.e" not in name
    )


def test_a_step_of_a_hybrid() -> None:
    config = tiny_config("M*-")
    weights, head = matrices(config), config.hidden_size * config.vocab_size
    state = (2 + 2 * 4 / 16) * 4 * 8 * 16  # read as bfloat16, and once in 16 tokens updated; 4 heads of 8 x 16
    floor = Floor(config, None)
    for requests in (1, 7):
        read = 2 * (weights + head) + requests * state
        assert floor.step(MACHINE, requests) == pytest.approx(read / MACHINE.bandwidth)
    slow = Machine(flops=1e3, bandwidth=1e10)
    assert floor.prompt(slow, 50, 2) == pytest.approx(2 * (50 * weights + 2 * head) / 1e3)


def test_experts_count_as_often_as_they_are_chosen() -> None:
    experts = Experts(16, 8, 2, 12, None, mlp_hidden_act="silu", gated=True, routing="softmax")
    config = DecoderConfig(10, 16, (Layer((("mixer", experts),)),))
    one, head, router = 3 * 12 * 16, 16 * 10, 8 * 16
    slow = Machine(flops=1.0, bandwidth=1e30)
    assert Floor(config, None).step(slow, 3) == pytest.approx(2 * 3 * (2 * one + router + head))
    read = Floor(config, None).step(Machine(1e30, 1.0), 1)
    assert read == pytest.approx(2 * (2 * one + router + head)), "a single token reads the experts that it chooses"
    assert Floor(config, None).step(Machine(1e30, 1.0), 500) == pytest.approx(2 * (8 * one + router + head))


def test_the_released_shape_has_the_released_size() -> None:
    mlp, attention = Mlp(1024, 3584, "silu", gated=True), Attention(1024, 8, 2, 256, gate=True, qk_norm=1e-6)
    delta = GatedDelta(1024, 16, 16, 128, 128)
    layers = [Layer((("mixer", attention if index % 4 == 3 else delta),)) for index in range(24)]
    config = DecoderConfig(248320, 1024, tuple(part for of in layers for part in (of, Layer((("m", mlp),)))))
    bytes_read = Floor(config, None).step(Machine(1e30, 1.0), 1)
    assert 1.50e9 < bytes_read < 1.56e9, "1.5 GB of weights, 18 MiB of states"


def test_an_image_costs_its_patches_and_its_tokens() -> None:
    tower = Tower(of_patch=100, of_token=40, attention=3, patch=16, merged=4)
    assert tower.tokens([(64, 32), (32, 32)]) == 3
    seconds = tower.seconds(Machine(1.0, 1.0), [(64, 32)])
    assert seconds == 2 * (100 * 8 + 40 * 2) + 4 * 3 * 64
    config = tiny_config("M")
    load = Workload("image", [[1, 2, 3]], [[Path("a.png")]], 1, ((64, 32),))
    floor = Floor(config, tower)
    expected = floor.prompt(MACHINE, 4, 1) + tower.seconds(MACHINE, [(64, 32)])
    assert load.floor(floor, MACHINE) == pytest.approx(expected)
    assert load.floor(Floor(config, None), MACHINE) is None


def test_a_large_checkpoint_in_small(tmp_path: Path) -> None:
    """As many layers as fit, in the formats of the release, and a model that runs."""
    other = {
        "model": {"projector_hidden_size": 64},
        "text": {"vocab_size": 97, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "n_groups": 2,
                 "moe_shared_expert_intermediate_size": 48, "num_attention_heads": 4, "ssm_state_size": 8,
                 "mamba_num_heads": 8, "mamba_head_dim": 8},
        "vision": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_img_size": 64},
    }  # fmt: skip
    layers = large_checkpoint.write_checkpoint(tmp_path / "large", 0.0, 8, other)
    assert layers == 6, "up to the first with attention, whatever the limit"
    smallest = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    more = large_checkpoint.write_checkpoint(tmp_path / "more", 2 * smallest / 1e9, 8, other)
    assert 6 < more < 52
    checkpoint = Checkpoint(tmp_path / "more")
    assert smallest < sum(checkpoint.stored_as.values()) <= 2 * smallest
    assert set(checkpoint.stored_as) == {"plain", "nvfp4", "fp8-tensor"}
    kinds = {name: weight.kind for name, weight in checkpoint.decoder_weights() if isinstance(weight, Quantised)}
    assert kinds["model.layers.1.mixer.experts.up_proj"] == "nvfp4"
    assert kinds["model.layers.1.mixer.shared_experts.up_proj.weight"] == "fp8"
    one = large_checkpoint.bytes_of_a_token(checkpoint)
    assert one < sum(checkpoint.weight_bytes(name, 2) for name in checkpoint.config.decoder.expected_weights())
    options = DecoderOptions(max_seqs=1, max_len=32, max_batched_tokens=16)
    runner = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights())
    found = run(runner, request("one", [5, 7, 11], greedy_params(4, logprobs=1)))["one"]
    assert len(tokens(found)) == 4 and all(-20 < event.logprob <= 0 for event in found)
    assert large_checkpoint.write_checkpoint(tmp_path / "more", 99.0, 8, other) == more, "what is there is kept"


def test_the_limits_of_a_workload_are_medians_of_those_beside_its_rounds() -> None:
    measured = [{"read_gb_s": gigabytes, "bf16_gflop_s": 400.0} for gigabytes in (57.0, 35.0, 36.0)]
    assert typical(measured) == {"read_gb_s": 36.0, "bf16_gflop_s": 400.0}


def test_the_share_of_other_programs() -> None:
    start = ProcessorTime(total=100.0, busy=40.0, own=5.0)
    assert start.others(ProcessorTime(110.0, 46.0, 9.0)) == pytest.approx(0.2)
    assert start.others(ProcessorTime(110.0, 44.0, 9.1)) == 0.0, "the kernel counts in hundredths of a second"
    assert start.others(start) == 0.0
    header = machine.header("schedule", ["--steps", "1"], machine.before())
    assert header["command"] == "python -m benchmarks.schedule --steps 1" and header["load_before"] >= 0
    assert 0 <= header.get("others_share", 0) <= 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core sends itself no messages")
def test_a_message_between_cores() -> None:
    """Two atomic operations of two cores take longer than one of a single core, and no thread sleeps."""
    assert (found := round_trip()) is not None and 1e-8 < found < 1e-4


def test_the_result_of_a_workload() -> None:
    load = Workload("decode 2", [[1] * 10] * 2, [[], []], 5)
    seconds = [[(1.0, 2.0), (3.0, 6.0)], [(2.0, 5.0)], [(2.0, 2.0), (2.0, 2.0)]]
    runs = [[(Timed(ours, [0.25, 0.5]), Timed(peer, [])) for ours, peer in each] for each in seconds]
    limits = {"read_gb_s": 10.0, "bf16_gflop_s": 1000.0}
    floor = Floor(tiny_config("M*-"), None)
    row = Measured(load, runs, [(0.5, 1.0)] * 3, [(limits, limits, limits)] * 3).row(floor, (7, 8))
    assert (row["ours_s"], row["peer_s"], row["ratio"]) == (2.0, 2.0, 2.0)
    assert row["ours_first_token_p99_s"] == 0.5 and "peer_first_token_p99_s" not in row
    assert row["rounds"] == [{"ours_s": 2.0, "peer_s": peer} for peer in (4.0, 5.0, 2.0)]
    assert (row["ratio_min"], row["ratio_max"]) == (1.0, 2.5)
    assert (row["ours_tokens_s"], row["ours_decode_tokens_s"], row["peer_decode_tokens_s"]) == (5.0, 8 / 1.5, 8 / 3.0)
    assert row["ours_decode_floor_fraction"] == pytest.approx(4 * floor.step(MACHINE, 2) / 1.5)
    assert row["floor_fraction"] == pytest.approx((4 * floor.step(MACHINE, 2) + floor.prompt(MACHINE, 20, 2)) / 2.0)
    assert (row["ours_peak_bytes"], row["peer_peak_bytes"], row["ceilings"]) == (7, 8, limits)


def test_the_roofline_share_of_a_run_is_that_of_the_machine_during_the_run() -> None:
    """A host that doubles the bandwidth between two rounds changes no share."""
    load, floor = Workload("decode 1", [[1] * 10], [[]], 5), Floor(tiny_config("M*-"), None)
    slow, fast = ({"read_gb_s": gigabytes, "bf16_gflop_s": 1e9} for gigabytes in (1.0, 2.0))
    runs = [[(Timed(seconds, [0.5]), Timed(2 * seconds, []))] for seconds in (2.0, 1.0)]
    row = Measured(load, runs, [(0.0, 0.0)] * 2, [(slow, slow, slow), (fast, fast, fast)]).row(floor, (7, 8))
    assert row["floor_fraction"] == pytest.approx(load.floor(floor, Machine.of(slow)) / 2.0)
    assert row["peer_floor_fraction"] == pytest.approx(row["floor_fraction"] / 2)
    changed = Measured(load, runs[:1], [(0.0, 0.0)], [(slow, fast, fast)]).row(floor, (7, 8))
    assert changed["floor_fraction"] == pytest.approx(row["floor_fraction"] / 1.5)
    assert changed["peer_floor_fraction"] == pytest.approx(row["peer_floor_fraction"] / 2)


@pytest.mark.parametrize(
    ("shape", "parameters", "active"), [("600m", 0.6e9, 0.6e9), ("1500m", 1.5e9, 1.5e9), ("moe", 3e9, 0.6e9)]
)
def test_a_shape_has_the_size_of_its_name(shape: str, parameters: float, active: float, tmp_path: Path) -> None:
    from transformers import NemotronHConfig

    fields = sized_models.fields(shape)
    NemotronHConfig(**fields, architectures=["NemotronHForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    assert sized_models.parameters(tmp_path) == pytest.approx(parameters, rel=0.05)
    slow, head = Machine(flops=2.0, bandwidth=1e30), fields["hidden_size"] * fields["vocab_size"]
    used = Floor(load_config(tmp_path).decoder, None).step(slow, 1) + head  # as many embeddings
    assert used == pytest.approx(active, rel=0.05)


def test_a_sized_checkpoint_in_small_runs(tmp_path: Path) -> None:
    small = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16,
             "moe_shared_expert_intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
             "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "n_routed_experts": 4,
             "num_experts_per_tok": 2}  # fmt: skip
    for shape in ("600m", "moe"):
        path = tmp_path / shape
        sized_models.write(path, {**sized_models.fields(shape), **small})
        checkpoint = Checkpoint(path)
        options = DecoderOptions(max_seqs=1, max_len=32, max_batched_tokens=16)
        runner = DecoderRunner(checkpoint.config.decoder, options, checkpoint.decoder_weights())
        found = run(runner, request("one", [5, 7, 11], greedy_params(4, logprobs=1)))["one"]
        assert len(tokens(found)) == 4 and all(-20 < event.logprob <= 0 for event in found)
    spent = bookkeeping.measure(Checkpoint(tmp_path / "600m"), 3, 2)
    assert spent["requests"] == 3 and 0 < spent["bookkeeping_ms"] < spent["step_ms"]


def test_prompts_of_another_length_come_fewer_at_a_time(tmp_path: Path) -> None:
    subject, only = SUBJECTS["nemotron_h"], {"decode", "prefill"}
    for length, counts in ((128, {1, 32}), (1024, {1, 32}), (8192, {1})):
        loads, _ = workloads(subject, tmp_path, only, (1, 8), 4, length)
        assert {len(prompt) for load in loads for prompt in load.prompts} == {length}
        assert {load.longest for load in loads} == {length + 8, length + 4, length + 1}
        assert {len(load.prompts) for load in loads if load.name.startswith("prefill")} == counts


def test_prompts_beyond_the_positions_of_a_checkpoint() -> None:
    without = replace(tiny_config("M*"), max_position_embeddings=100)
    assert length_options(without, 100) == () and length_options(without, 101) == ("--max-len", "101")
    with pytest.raises(SystemExit, match="101 tokens, the checkpoint 100 positions"):
        length_options(replace(without, position_axes=1), 101)


def test_results_are_written_in_one_place() -> None:
    """The name of a result's file has its date; nothing else in benchmarks/ makes such a name."""
    files = sorted(Path(large_checkpoint.__file__).parent.glob("*.py"))
    assert [file.name for file in files if re.search(r"date\.today\(\)(:%Y-%m-%d)?\}-", file.read_text("utf-8"))] == [
        "record.py"
    ]
