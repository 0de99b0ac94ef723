"""Code that is captured in CUDA graphs reads no values: it runs on tensors without values. On torch's "meta" device
every read by the host raises, and so does an operation that also takes a CPU tensor; kernels are recorded instead of
launched. Code that passes here needs no host sync and no copy from the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gated_decoder import gated_config
from qwen_vision import tiny_qwen
from tiny_decoder import delta_config, make_runner, tiny_config
from tiny_encoder import tiny_tower

from decoder.graphs import DecoderGraphs, graph_bytes
from encoder.budget import EncoderBudgets, graph_shape
from encoder.graphs import _step
from encoder.plan import buffer_sizes
from families.lfm3_vl.tower import GridTower
from families.lfm3_vl.vision import GridVision
from families.nemotron_h_omni.tower import RadioTower
from families.nemotron_h_omni.vision import RadioVision
from families.qwen3_5.tower import QwenTower
from kernels.dispatch import forced
from kernels.launch import Launch, recording

SPECULATIVE = {"state_cache": "none", "speculative": "ngram", "draft_tokens": 2}
META = torch.device("meta")


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with forced("triton"), recording("sm_90") as launches:
        yield launches


@pytest.mark.parametrize("spec_state", ["slots", "replay"])
@pytest.mark.parametrize("kind", ["decode", "mixed", "verify"])
@pytest.mark.parametrize("model", ["plain", "delta", "short"])
def test_decoder_steps(
    kind: str, spec_state: str, model: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderGraphs, "check_integrity", lambda self: None)  # tensors on "meta" all have the address 0
    config = {"plain": tiny_config("M-*EM"), "delta": gated_config("G-*EG"), "short": delta_config("S-*ES")}[model]
    runner = make_runner(
        config, device="meta", max_batched_tokens=32, graphs="on", spec_state=spec_state, **SPECULATIVE
    )
    graphs = runner.forward.graphs
    assert graphs is not None
    buckets = [bucket for bucket in graphs.plan.buckets if bucket.kind == kind]
    for bucket in buckets:
        graphs._graphs[bucket].replay(graphs._inputs(bucket))
    names = {launch.kernel.__name__ for launch in launches}
    wanted = {"attend", "_choose", "_rms_norm_kernel"} | ({"_gated_norm_kernel"} if model != "short" else set())
    if model == "short":
        replay = kind == "verify" and spec_state == "replay"
        wanted.add("_packed_kernel" if kind == "mixed" else "_mix_kernel" if replay else "_update_kernel")
    if model == "delta":
        wanted |= {"_norm_rotate_kernel", "_product_kernel"}
        wanted |= {
            "decode": {"_update_kernel"},
            "mixed": {"_gates_kernel", "_prepare_kernel", "_states_kernel", "_outputs_kernel"},
            "verify": {"_replay_kernel"} if spec_state == "replay" else {"_update_kernel"},
        }[kind]
    assert len(buckets) > 2 and wanted <= names, names


@pytest.mark.parametrize("pattern", ["G*", "M*"])
def test_states_between_the_chunks_of_a_scan_are_reserved(
    pattern: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecoderGraphs, "check_integrity", lambda self: None)
    large = {"ssm_state_size": 128, "mamba_head_dim": 64}
    config = delta_config(pattern, {"key_head_dim": 64, "value_head_dim": 64}, **(large if pattern == "M*" else {}))
    runner = make_runner(config, device="meta", max_batched_tokens=32, graphs="on", **SPECULATIVE)
    graphs = runner.forward.graphs
    assert graphs is not None
    for bucket in graphs.plan.buckets:
        if bucket.kind == "mixed":
            graphs._graphs[bucket].replay(graphs._inputs(bucket))
    left = max(launch.arguments["p_before"].nbytes for launch in launches if "p_before" in launch.arguments)
    assert graph_bytes(config, runner.options) > left > 10**6


def _without_products(launches: list[Launch]) -> list[str]:
    """The names of the kernels that run, except those of products with a weight."""
    names = [launch.kernel.__name__ for launch in launches]
    assert "_described_kernel" in names or "_rows_kernel" in names
    return [name for name in names if name not in ("_described_kernel", "_rows_kernel")]


@pytest.mark.parametrize("final_layernorm", [True, False])
def test_encoder_steps(final_layernorm: bool, launches: list[Launch]) -> None:
    given = tiny_tower(final_layernorm=final_layernorm)
    config: RadioVision = given.config
    tower = RadioTower(config, given.weights.items(), dtype=torch.bfloat16, device=META)
    budgets = EncoderBudgets((12, 20), 2)
    shape = graph_shape(20, budgets, prefix=config.num_prefix_tokens, patches_per_token=config.patches_per_token)
    sizes = buffer_sizes(shape, config)
    buffers = {name: torch.empty(size, dtype=kind or tower.dtype, device=META) for name, (size, kind) in sizes.items()}
    _step(tower, shape, "image")(buffers, buffers)
    assert _without_products(launches) == ["_embed", *["_varlen"] * config.num_layers, "_shuffle_norm"]


@pytest.mark.parametrize("kind", ["image", "video"])
def test_steps_of_an_encoder_that_rotates(kind: str, launches: list[Launch]) -> None:
    given = tiny_qwen(hidden_size=144, num_heads=2)
    tower = QwenTower(given.config, given.weights.items(), dtype=torch.bfloat16, device=META)
    shape = graph_shape(20, EncoderBudgets((12, 20), 2), prefix=0, patches_per_token=4)
    sizes = buffer_sizes(shape, given.config, (kind,))
    buffers = {name: torch.empty(size, dtype=kind or tower.dtype, device=META) for name, (size, kind) in sizes.items()}
    _step(tower, shape, kind)(buffers, buffers)
    layers = ["_norm_rotate_kernel", "_varlen"] * given.config.num_layers
    assert _without_products(launches) == ["_embed", *layers, "_shuffle_norm"]


def test_steps_of_an_encoder_that_convolves(launches: list[Launch]) -> None:
    config = GridVision(
        hidden_size=32, layer_types=("conv", "full_attention"), num_heads=2, num_key_value_heads=1,
        intermediate_size=32, text_hidden_size=16, projector_hidden_size=32, patch_size=4,
    )  # fmt: skip
    weights = {name: torch.empty(shape, device=META) for name, shape in config.expected_weights().items()}
    tower = GridTower(config, weights.items(), dtype=torch.bfloat16, device=META)
    shape = graph_shape(20, EncoderBudgets((12, 20), 2), prefix=0, patches_per_token=4)
    sizes = buffer_sizes(shape, config, ("video",))
    buffers = {name: torch.empty(size, dtype=kind or tower.dtype, device=META) for name, (size, kind) in sizes.items()}
    _step(tower, shape, "video")(buffers, buffers)
    names = _without_products(launches)
    assert names.count("_varlen") == 1 and names[-1] == "_shuffle_norm"
    assert set(names) == {"_rms_norm_kernel", "_norm_rotate_kernel", "_varlen", "_shuffle_norm"}


def test_a_read_by_the_host_is_seen() -> None:
    with pytest.raises(RuntimeError):
        torch.empty(3, device=META).tolist()
