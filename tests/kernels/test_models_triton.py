"""Both runners on Triton kernels: the same answers as with the reference operations."""

from __future__ import annotations

import pytest
import torch
from qwen_vision import random_item, tiny_qwen
from tiny_decoder import TINY, make_runner, request, run, tiny_config, tokens
from tiny_encoder import random_image, relative_error, tiny_tower
from triton_kernels import DEVICE

from decoder.config import WEIGHT_KINDS, DecoderOptions
from decoder.layers.descriptions import Experts
from decoder.layers.experts import ExpertsMixer
from decoder.sampling import SamplingParams
from encoder.runner import EncoderOptions, EncoderRunner
from kernels.dispatch import forced


def answers(graphs: str) -> dict[str, list[int]]:
    """A drawn and a filtered row that are decoded and extended side by side."""
    config = tiny_config("*EM-")
    runner = make_runner(config, device=str(DEVICE), max_seqs=3, max_len=64, max_batched_tokens=16, graphs=graphs)
    generator = torch.Generator().manual_seed(3)
    asked = [
        SamplingParams(max_tokens=3, temperature=1.0, seed=5),
        SamplingParams(max_tokens=2, temperature=0.8, top_k=20, top_p=0.9, seed=2**64 - 3, presence_penalty=0.5),
    ]
    prompts = [torch.randint(0, TINY["vocab_size"], (size,), generator=generator).tolist() for size in (1, 18)]
    events = run(runner, *(request(str(i), prompt, params) for i, (prompt, params) in enumerate(zip(prompts, asked))))
    return {name: tokens(found) for name, found in events.items()}


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_decoder(graphs: str) -> None:
    expected = answers("off")
    with forced("triton"):
        assert answers(graphs) == expected


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("final_layernorm", [True, False], ids=["final-norm", "plain"])
def test_encoder(graphs: str, final_layernorm: bool) -> None:
    tower = tiny_tower(final_layernorm=final_layernorm)
    images = [random_image(tower.config, 4, 6), random_image(tower.config, 6, 4, seed=1)]
    options = EncoderOptions(dtype=torch.float32, device=DEVICE, graphs=graphs, token_budgets=(12, 20), max_images=2)

    def rows() -> list[torch.Tensor]:
        runner = EncoderRunner(tower.config, options, tower.weights.items())
        out = [torch.empty(image.tokens, tower.config.text_hidden_size, device=DEVICE) for image in images]
        runner.encode(images, out)
        assert any(name.startswith("replays_") for name in runner.stats()) == (graphs == "on")
        runner.close()
        return out

    with forced("triton"):
        found = rows()
    for got, expected in zip(found, tower.features(images), strict=True):
        assert relative_error(got.cpu(), expected) < 1e-5


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_encoder_that_rotates(graphs: str) -> None:
    tower = tiny_qwen(hidden_size=72, num_heads=1)
    items = [random_item(tower.config, (4, 6)), random_item(tower.config, (6, 2), 1, pairs=2)]
    options = EncoderOptions(
        dtype=torch.float32, device=DEVICE, graphs=graphs, token_budgets=(12, 20), max_images=2, graph_kinds=None
    )
    with forced("triton"):
        runner = EncoderRunner(tower.config, options, tower.weights.items())
        found = [torch.empty(item.tokens, tower.config.row_width, device=DEVICE) for item in items]
        runner.encode(items, found)
        runner.close()
    for got, expected in zip(found, tower.rows(items), strict=True):
        assert relative_error(got.cpu(), expected) < 1e-5


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_layer_of_quantised_experts(kind: str) -> None:
    """Quantised as they are read, in each kind."""
    spec = Experts(32, 6, 2, 48, 40, gated=True, mlp_hidden_act="silu", routing="softmax")
    weights = {name: torch.randn(size, device=DEVICE) / size[-1] ** 0.5 for name, size in spec.weights().items()}
    x = torch.randn(5, 32, device=DEVICE)
    options = DecoderOptions(device=str(DEVICE), dtype=torch.float32, weights=kind)
    with forced("reference"):
        expected = ExpertsMixer(spec, options, weights)(x)
    with forced("triton"):
        torch.testing.assert_close(ExpertsMixer(spec, options, weights)(x), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize(
    ("gated", "activation", "shared"),
    [(True, "silu", 40), (True, "gelu_pytorch_tanh", None), (False, "silu", None), (False, "gelu", 40)],
)
def test_a_layer_of_experts(gated: bool, activation: str, shared: int | None, tokens: int) -> None:
    """Softmax routing among experts of any activation, gated or not."""
    spec = Experts(
        32, 6, 2, 24, shared, mlp_hidden_act=activation, gated=gated, routing="softmax"
    )  # fmt: skip
    weights = {name: torch.randn(size, device=DEVICE) / size[-1] ** 0.5 for name, size in spec.weights().items()}
    x, options = torch.randn(tokens, 32, device=DEVICE), DecoderOptions(device=str(DEVICE), dtype=torch.float32)

    def added() -> torch.Tensor:
        return ExpertsMixer(spec, options, weights)(x)

    with forced("reference"):
        expected = added()
    with forced("triton"):
        torch.testing.assert_close(added(), expected, rtol=1e-5, atol=1e-5)
