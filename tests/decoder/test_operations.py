"""Compiled layers on their own: mixtures of experts against the mixer that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_decoder import random_weights, tiny_config
from torch import Tensor

from decoder.config import DecoderConfig, DecoderOptions
from decoder.mixers import ExpertsMixer
from decoder.operations import Operations
from kernels.native.structs import Step
from kernels.rms_norm import rms_norm

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "single-groups": {"n_routed_experts": 5, "n_group": 5, "topk_group": 3, "num_experts_per_tok": 2},
    "scaled": {
        "n_routed_experts": 130,
        "num_experts_per_tok": 7,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    },
    "latent": {"moe_latent_size": 21, "mlp_bias": True},
    "odd": {"hidden_size": 67, "moe_intermediate_size": 131, "moe_shared_expert_intermediate_size": 77},
}


class Layer:
    """One layer of experts: `mixer` as it is called, and compiled."""

    def __init__(self, shape: str, options: DecoderOptions) -> None:
        self.config = config = tiny_config("E", **SHAPES[shape])
        prefix = "model.layers.0."
        weights = {n.removeprefix(prefix): w for n, w in random_weights(config) if n.startswith(prefix)}
        self.norm, self.options = weights.pop("norm.weight"), options
        weights = {name.removeprefix("mixer."): tensor.to(options.dtype) for name, tensor in weights.items()}
        self.mixer = ExpertsMixer(config, options, weights)
        self.exact = ExpertsMixer(config, replace(options, dtype=torch.float32, weights=None), weights)
        self.compiled = Operations(config, options)
        ops = self.compiled.layer(self.norm, self.mixer)
        self.range = range(len(ops))
        self.compiled.complete(ops, 64)

    def __call__(self, x: Tensor) -> Tensor:
        """What the compiled layer adds to `x`."""
        self.compiled.x[: x.shape[0]] = x
        self.compiled.run(self.range, Step(tokens=x.shape[0]))
        return self.compiled.x[: x.shape[0]] - x

    def called(self, mixer: ExpertsMixer, x: Tensor) -> Tensor:
        return mixer(rms_norm(x, self.norm, self.config.layer_norm_epsilon, mixer.gate_ED.dtype))


def rows(config: DecoderConfig, count: int) -> Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_in_float32(shape: str, tokens: int) -> None:
    layer = Layer(shape, DecoderOptions())
    x = rows(layer.config, tokens)
    expected = layer.called(layer.mixer, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=2e-6 * expected.abs().max().item())


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_in_fewer_bits_are_no_further_off_than_the_mixer(shape: str, weights: str | None) -> None:
    layer = Layer(shape, DecoderOptions(dtype=torch.bfloat16, weights=weights))
    x = rows(layer.config, 48)
    exact = layer.called(layer.exact, x)
    given = rms_norm(x, layer.norm, layer.config.layer_norm_epsilon, torch.bfloat16)
    allowed = (layer.mixer(given).float() - exact).square().mean().sqrt()
    assert 0 < (layer(x) - exact).square().mean().sqrt() <= 1.2 * allowed


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", ["groups", "latent", "odd"])
def test_a_token_is_the_same_in_any_batch_and_with_any_threads(shape: str, weights: str | None) -> None:
    layer = Layer(shape, DecoderOptions(dtype=torch.bfloat16, weights=weights))
    x = rows(layer.config, 64)
    together = layer(x).clone()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(before)
    for token in range(0, 64, 9):
        assert torch.equal(layer(x[token : token + 1])[0], together[token])
    some = torch.tensor([5, 63, 17, 2, 40])
    assert torch.equal(layer(x[some]), together[some])


def test_what_is_not_a_number_stays_in_its_row() -> None:
    layer = Layer("groups", DecoderOptions())
    x = rows(layer.config, 6)
    clean = layer(x).clone()
    x[2, 3] = float("nan")
    found = layer(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])
