"""Both runners on a simulated GPU: devices are never mixed, and captures hold exactly what a replay needs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from gated_decoder import gated_config
from pretend_gpu import GpuTensor, pretended
from qwen_vision import random_item, tiny_qwen
from speculation import Answers, answers
from tiny_decoder import random_weights, tiny_config
from tiny_encoder import random_image, relative_error, tiny_tower
from torch import Tensor

from decoder.config import DecoderOptions
from decoder.runner import DecoderRunner
from encoder.runner import EncoderOptions, EncoderRunner
from kernels.graphs import GraphPool, StaticGraph
from kernels.linear import Linear, Quantised, quantise
from kernels.moe import Experts
from kernels.rms_norm.kernel import rms_norm
from kernels.streams import behind, mark, on, side_stream
from kernels.weight_forms import FORMS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter, not a GPU")
SMALL: dict[str, Any] = {"count": 2, "output": 5, "max_seqs": 2, "max_batched_tokens": 4, "native": "off"}
MODELS: dict[str, dict[str, Any]] = {"plain": {"pattern": "M*E"}, "delta": {"config": gated_config("G*-", mtp=True)}}
"""With the gated delta rule, attention is gated, normalised and uses image positions."""


@pytest.fixture
def gpu() -> Iterator[None]:
    with pretended():
        yield


@cache
def on_the_host(model: str) -> Answers:
    with torch.no_grad():
        return answers(**SMALL, **MODELS[model], graphs="off", state_cache="none")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a warning of NumPy about the contents of padding
@pytest.mark.parametrize(
    ("model", "options", "replayed"),
    [
        pytest.param("plain", {"state_cache": "all"}, {"replays_decode", "replays_mixed"}, id="plain-checkpoints"),
        pytest.param(
            "plain",
            {"state_cache": "auto", "speculative": "ngram", "draft_tokens": 2, "spec_state": "replay"},
            {"replays_verify", "replays_mixed"},
            id="plain-drafts",
        ),
        pytest.param(
            "delta",
            {"state_cache": "all", "speculative": "mtp", "draft_tokens": 2, "spec_state": "replay"},
            {"replays_decode", "replays_verify", "replays_mixed"},
            id="delta-checkpoints-heads",
        ),
    ],
)
def test_decoder(model: str, options: dict[str, Any], replayed: set[str]) -> None:
    expected = on_the_host(model)
    with pretended("cuda:1"):
        found = answers(
            **SMALL, **MODELS[model], **options, graphs="on", max_capture=4, device="cuda:1", known=expected.drawn
        )
    assert found.drawn == expected.drawn
    assert replayed <= {name.rpartition("_")[0] for name, count in found.stats.items() if count}


def test_quantised_weights_are_not_called_slow(gpu: None, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel multiplies them; only without compiled code for a CPU are they expanded."""
    config, options = tiny_config("-"), DecoderOptions(device="cuda", graphs="off", weights="int8", max_len=64)
    DecoderRunner(config, options, random_weights(config)).close()
    assert "expanded" not in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_quantised_on_their_device(form: str, gpu: None) -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    weight[2] = 0  # a scale of 0
    expected, found = quantise(weight, form), quantise(weight.to("cuda"), form)
    assert all(isinstance(tensor, GpuTensor) for tensor in found.tensors)
    for tensor, exact in zip(found.tensors, expected.tensors, strict=True):
        assert torch.equal(tensor.cpu().view(torch.uint8), exact.view(torch.uint8))


def test_groups_without_a_kernel_are_refused_when_a_layer_is_built(gpu: None) -> None:
    values, scale = torch.zeros(2, 24, 12, dtype=torch.uint8, device="cuda"), torch.ones(2, 24, 3, device="cuda")
    weight = Quantised("int4", values, scale, 24, group=8)
    for build in (lambda: Linear(weight[0]), lambda: Experts(weight, weight)):
        with pytest.raises(ValueError, match="24 inputs in groups of 8 inputs has no kernel on a GPU"):
            build()


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("tower", ["plain", "rotated"])
def test_encoder(tower: str, graphs: str) -> None:
    grids = [(4, 6), (2, 2), (8, 8)]
    tiny: Any = tiny_tower(11, final_layernorm=True) if tower == "plain" else tiny_qwen(11)
    if tower == "plain":
        images = [random_image(tiny.config, *grid, seed=index) for index, grid in enumerate(grids)]
    else:
        images = [random_item(tiny.config, grid, seed=index) for index, grid in enumerate(grids)]

    def encode(device: str, graphs: str) -> list[Tensor]:
        options = EncoderOptions(
            dtype=torch.float32, device=torch.device(device), graphs=graphs, token_budgets=(12, 24), max_images=4
        )
        runner = EncoderRunner(tiny.config, options, tiny.weights.items())
        out = [torch.empty(image.tokens, tiny.config.row_width, device=device) for image in images]
        runner.encode(images, out)
        assert any(name.startswith("replays_") for name in runner.stats()) == (graphs == "on")
        runner.close()
        return [rows.cpu() for rows in out]

    expected = encode("cpu", "off")
    with pretended("cuda:1"):
        found = encode("cuda:1", graphs)
    for rows, exact in zip(found, expected, strict=True):
        assert relative_error(rows, exact) <= 1e-5


@pytest.mark.parametrize("make", [tiny_tower, tiny_qwen])
def test_patches_in_bytes_become_floats_on_the_device(make: Any, gpu: None) -> None:
    given = make()
    for kind, width in given.config.patch_widths.items():
        octets, found = torch.randint(0, 256, (5, width), dtype=torch.uint8), []
        for device in ("cpu", "cuda"):
            tower = given.config.build(given.weights.items(), dtype=torch.float32, device=torch.device(device))
            found.append(tower.as_floats(octets.to(device)).cpu())
        assert torch.equal(*found), kind


def test_a_replay_reads_and_writes_the_memory_of_its_capture(gpu: None) -> None:
    x, y, factor = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"), [2.0]

    def step(inputs: Any, outputs: Any) -> None:
        middle = inputs["x"] * factor[0]
        outputs["y"][1:] = middle[1:] + 1

    graph = StaticGraph("twice", step, {"x": x}, {"y": y}, GraphPool(x.device))
    graph.capture()
    x.fill_(5.0)
    factor[0] = 100.0  # the captured graph has fixed it
    graph.replay({"x": x})
    assert y.tolist() == [0.0, 11.0, 11.0, 11.0]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda x: x.sum().item(), id="a-value"),
        pytest.param(lambda x: x.tolist(), id="values"),
        pytest.param(lambda x: x.nonzero(), id="a-shape"),
        pytest.param(lambda x: torch.tensor([1.0], device="cuda"), id="numbers-of-the-host"),
        pytest.param(lambda x: x.copy_(torch.zeros(4)), id="a-copy"),
        pytest.param(lambda x: torch.cuda.synchronize(), id="a-wait"),
    ],
)
def test_what_no_capture_may_hold(step: Any, gpu: None) -> None:
    x = torch.ones(4, device="cuda")
    step(x)
    graph = StaticGraph(
        "bad", lambda inputs, outputs: step(inputs["x"]), {"x": x}, {"y": x.clone()}, GraphPool(x.device)
    )
    with pytest.raises(RuntimeError, match="capture"):
        graph.capture()


def test_streams_are_in_no_order_but_by_events(gpu: None) -> None:
    """Memory that one stream has written, allocated or read may be used or written by another only after an event or a
    wait."""
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="behind no event"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        read = torch.cuda.Event()
        read.record()
    with pytest.raises(RuntimeError, match="written"):
        y + 1
    with pytest.raises(RuntimeError, match="used"):
        x.zero_()
    torch.cuda.current_stream().wait_event(read)
    x.zero_()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="written"):
        x + 1
    assert (y + x).tolist() == [2.0] * 4
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        assert (x + 1).tolist() == [1.0] * 4


def test_a_side_stream_begins_behind_what_is_in_progress(gpu: None) -> None:
    x = torch.ones(4, device="cuda")
    with on(side_stream("cuda")):
        y = x + 1
        event = mark("cuda")
    assert (behind(event, y) + 1).tolist() == [3.0] * 4


def test_kernels_run_on_the_device_of_their_tensors() -> None:
    with pretended("cuda:1"):
        x, weight = torch.ones(2, 16, device="cuda:1"), torch.ones(16, device="cuda:1")
        assert rms_norm(x, weight, 1e-5).device == x.device


def test_devices_do_not_mix(gpu: None) -> None:
    x = torch.ones(2, 16, device="cuda")
    assert isinstance(x, GpuTensor) and x.device.type == "cuda" and (x + torch.tensor(1.0)).device == x.device
    with pytest.raises(RuntimeError, match="of the host"):
        x + torch.ones(16)
    with pytest.raises(ValueError, match="p_weight cannot be accessed"):
        rms_norm(x, torch.ones(16), 1e-5)
