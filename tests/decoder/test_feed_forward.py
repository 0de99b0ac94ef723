"""Compiled MLPs and experts of any kind give the results of the layers that they replace, with bits that do not depend
on the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from compiled import needs_compiled
from tiny_decoder import random_weights
from torch import Tensor

from decoder.arena import Arena
from decoder.arriving_weights import ArrivingWeights
from decoder.config import DecoderConfig, DecoderOptions
from decoder.layers.build import BuiltLayer, build_layers
from decoder.layers.descriptions import Experts, Mlp
from decoder.layers.experts import ExpertsMixer
from decoder.layers.spec import Layer, MixerSpec
from decoder.operations import Operations
from kernels.native.structs import Step
from kernels.rms_norm import rms_norm

pytestmark = needs_compiled


@dataclass(frozen=True)
class Shape:
    mixers: tuple[MixerSpec, ...]
    scale: float = 1.0

    def config(self) -> DecoderConfig:
        named = tuple((f"mixer{index}", spec) for index, spec in enumerate(self.mixers))
        return DecoderConfig(97, self.mixers[0].hidden_size, (Layer(named, self.scale),))  # type: ignore[attr-defined]


GRANITE = Experts(64, 6, 2, 40, None, mlp_hidden_act="silu", gated=True, routing="softmax")
QWEN = Experts(64, 16, 4, 24, 48, mlp_hidden_act="silu", gated=True, routing="softmax", shared_gate=True)
SHAPES = {
    "swiglu": Shape((Mlp(64, 96, "silu", gated=True),)),
    "odd-swiglu": Shape((Mlp(67, 77, "silu", gated=True),)),
    "biased-swiglu": Shape((Mlp(64, 50, "silu", gated=True, mlp_bias=True),), 0.22),
    "geglu": Shape((Mlp(48, 130, "gelu_pytorch_tanh", gated=True),)),
    "reglu": Shape((Mlp(48, 16, "relu", gated=True),), 0.5),
    "gelu": Shape((Mlp(48, 130, "gelu"),)),
    "silu": Shape((Mlp(48, 131, "silu", mlp_bias=True),), 2.0),
    "granite": Shape((GRANITE, Mlp(64, 32, "silu", gated=True)), 0.22),
    "qwen": Shape((QWEN,)),
    "scaled-qwen": Shape((QWEN,), 0.3),
    "odd-qwen": Shape((replace(QWEN, hidden_size=67, moe_intermediate_size=33, n_routed_experts=130),)),
    "ungated-shared": Shape((replace(QWEN, gated=False, shared_gate=False, mlp_hidden_act="gelu"),)),
    "latent-swiglu": Shape((Experts(64, 8, 3, 24, 40, 21, "silu", gated=True, mlp_bias=True),), 0.7),
    "wide": Shape((Mlp(1100, 70, "silu", gated=True),)),
    "lfm2": Shape((Experts(64, 8, 3, 24, None, None, "silu", gated=True, correction=False, weight_epsilon=0.5),)),
}


class Compiled:
    """One layer, `built` as a torch layer, and compiled."""

    def __init__(self, shape: str, options: DecoderOptions) -> None:
        self.config, self.options = SHAPES[shape].config(), options
        self.built, self.exact = self._layer(options), self._layer(replace(options, dtype=torch.float32, weights=None))
        self.compile()

    def compile(self) -> None:
        self.compiled = Operations(self.config, self.options, self.config.mixers)
        ops = self.compiled.layer(self.built)
        assert ops
        self.range = range(len(ops))
        self.compiled.complete(ops, 512)

    def _layer(self, options: DecoderOptions) -> BuiltLayer:
        weights = {
            name: weight if "norm" in name or "gate.weight" in name else weight.to(self.options.dtype).to(options.dtype)
            for name, weight in random_weights(self.config)
        }
        arriving = ArrivingWeights(self.config, weights.items())
        [layer] = build_layers(self.config, options, Arena(self.config, options), arriving)
        return layer

    def __call__(self, x: Tensor) -> Tensor:
        """What the compiled layer adds to `x`."""
        self.compiled.x[: x.shape[0]] = x
        self.compiled.run(self.range, Step(tokens=x.shape[0]))
        return self.compiled.x[: x.shape[0]] - x

    def called(self, layer: BuiltLayer, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        normed = rms_norm(x, layer.norm, self.config.norm_eps, dtype)
        return layer(normed, None).float()  # type: ignore[arg-type]

    def rows(self, count: int) -> Tensor:
        return torch.randn(count, self.config.hidden_size, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_equals_the_layer(shape: str, tokens: int) -> None:
    layer = Compiled(shape, DecoderOptions())
    x = layer.rows(tokens)
    expected = layer.called(layer.built, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=4e-6 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, "int8"), *((torch.bfloat16, weights) for weights in ("int8", "int8-32", "int4-32"))],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_rows_are_those_of_the_layer(shape: str, dtype: torch.dtype, weights: str) -> None:
    """In float32 a row may be rounded to the next step where the two differ in its last bits."""
    layer = Compiled(shape, DecoderOptions(dtype=dtype, weights=weights, activations="int8"))
    x = layer.rows(48)
    expected, exact = layer.called(layer.built, x, dtype), layer.called(layer.exact, x)
    size, error = exact.square().mean().sqrt(), (expected - exact).square().mean().sqrt()
    assert 0 < error < 0.2 * size
    assert (layer(x) - exact).square().mean().sqrt() <= 1.2 * error


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fewer_bits_are_no_further_off_than_the_layer(shape: str, weights: str | None) -> None:
    layer = Compiled(shape, DecoderOptions(dtype=torch.bfloat16, weights=weights))
    x = layer.rows(48)
    exact = layer.called(layer.exact, x)
    allowed = (layer.called(layer.built, x, torch.bfloat16) - exact).square().mean().sqrt()
    assert 0 < (layer(x) - exact).square().mean().sqrt() <= 1.2 * allowed


@pytest.mark.parametrize("kinds", [(None, None), ("int8", None), ("int8", "int8"), ("int4", None)], ids=str)
@pytest.mark.parametrize("shape", ["swiglu", "odd-swiglu", "wide", "granite", "qwen", "odd-qwen"])
def test_a_row_is_the_same_in_any_batch_and_with_any_threads(shape: str, kinds: tuple[str | None, str | None]) -> None:
    """All tile heights, a prompt of more than one block of rows, panels whole and (`wide`) divided."""
    layer = Compiled(shape, DecoderOptions(dtype=torch.bfloat16, weights=kinds[0], activations=kinds[1]))
    x = layer.rows(400)
    together = layer(x).clone()
    for threads in (2, 3, 64, 1):
        torch.set_num_threads(threads)
        for rows in (400, 193, 32, 8, 7, 5, 3, 1):
            assert torch.equal(layer(x[:rows]), together[:rows])
    some = torch.tensor([5, 63, 17, 2, 40, 399])
    assert torch.equal(layer(x[some]), together[some])
    for token in range(0, 400, 57):
        assert torch.equal(layer(x[token : token + 1])[0], together[token])


@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_scores_beyond_what_exp_can_take(factor: float) -> None:
    """All of a token's scores are far above 88, or below -88."""
    layer = Compiled("qwen", DecoderOptions())
    [mixer] = layer.built.mixers
    assert isinstance(mixer, ExpertsMixer)
    mixer.gate_ED.copy_(factor + mixer.gate_ED)
    layer.compile()
    x = layer.rows(20).abs()
    expected = layer.called(layer.built, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("shape", ["swiglu", "granite", "qwen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_a_number_stays_in_its_row(shape: str, dtype: torch.dtype) -> None:
    layer = Compiled(shape, DecoderOptions(dtype=dtype))
    x = layer.rows(6)
    clean = layer(x).clone()
    x[2, 3] = float("nan")
    found = layer(x)
    assert found[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])
