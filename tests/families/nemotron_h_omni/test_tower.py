"""The packed tower against transformers' own, over every shape of configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_encoder import TinyTower, random_image, relative_error, tiny_tower

from encoder.item import EncoderItem
from encoder.runner import EncoderOptions, EncoderRunner
from families.nemotron_h_omni.tower import interpolate_positions

OFF = EncoderOptions(dtype=torch.float32, graphs="off")


def encode(runner: EncoderRunner, images: list[EncoderItem]) -> list[torch.Tensor]:
    width, dtype = runner.spec.row_width, runner.options.dtype
    out = [torch.full((image.tokens, width), float("nan"), dtype=dtype) for image in images]
    runner.encode(images, out)
    runner.check_integrity()
    return out


def runner_of(tiny: TinyTower, options: EncoderOptions = OFF) -> EncoderRunner:
    return EncoderRunner(tiny.config, options, tiny.weights.items())


CONFIGURATIONS: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"final_layernorm": True}, id="final-norm"),
    pytest.param({"use_swiglu_ffn": True}, id="swiglu"),
    pytest.param({"qkv_bias": False}, id="no-qkv-bias"),
    pytest.param({"num_cls_tokens": 0, "num_registers": 0}, id="no-prefix"),
    pytest.param({"num_cls_tokens": 1, "num_registers": 0}, id="one-prefix"),
    pytest.param({"num_cls_tokens": 3, "num_registers": 7, "patch_size": 8, "max_img_size": 64}, id="ten-prefix"),
    pytest.param({"hidden_act": "gelu_pytorch_tanh"}, id="tanh-gelu"),
    pytest.param({"hidden_act": "quick_gelu"}, id="quick-gelu"),
    pytest.param({"hidden_act": "silu"}, id="silu"),
    pytest.param({"num_hidden_layers": 5, "num_attention_heads": 6, "mlp_ratio": 3.5}, id="deep"),
    pytest.param({"layer_norm_eps": 1e-3, "hidden_size": 32, "num_attention_heads": 1}, id="one-head"),
    pytest.param({"max_img_size": 8, "text_hidden_size": 24, "projector_hidden_size": 100}, id="small-table"),
    pytest.param({"video_temporal_patch_size": 3}, id="three-frames"),
]


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("changes", CONFIGURATIONS)
def test_features_equal_the_oracle(changes: dict[str, Any], native: str) -> None:
    tiny = tiny_tower(3, **changes)
    grids = [(4, 6), (2, 2), (12, 10), (2, 14), (4, 6)]
    images = [random_image(tiny.config, *grid, seed=i) for i, grid in enumerate(grids)]
    for got, expected in zip(
        encode(runner_of(tiny, replace(OFF, native=native)), images), tiny.features(images), strict=True
    ):
        assert relative_error(got, expected) <= 1e-5


def test_weight_names_and_shapes_are_the_checkpoint_s() -> None:
    for changes in ({}, {"use_swiglu_ffn": True, "qkv_bias": False, "final_layernorm": True}):
        tiny = tiny_tower(0, **changes)
        expected = tiny.config.expected_weights()
        assert {name: tuple(weight.shape) for name, weight in tiny.weights.items()} == expected
        assert tiny.config.optional_weights() < expected.keys()


def test_absent_layer_scales_and_final_norm_take_their_defaults() -> None:
    tiny = tiny_tower(1, final_layernorm=True, layerscale_value=0.7)
    weights = {k: v for k, v in tiny.weights.items() if k not in tiny.config.optional_weights()}
    with torch.no_grad():
        for name, weight in tiny.oracle.named_parameters():
            if "lambda1" in name:
                weight.fill_(0.7)
            elif name.startswith("vision_final_layernorm"):
                weight.fill_(float(name.endswith("weight")))
    images = [random_image(tiny.config, 4, 6)]
    (got,) = encode(EncoderRunner(tiny.config, OFF, weights.items()), images)
    assert relative_error(got, tiny.features(images)[0]) <= 1e-5


def test_missing_weights_are_named() -> None:
    tiny = tiny_tower(0)
    del tiny.weights["multi_modal_projector.linear_2.weight"]
    with pytest.raises(ValueError, match="linear_2"):
        runner_of(tiny)


def test_the_runner_keeps_no_view_of_the_given_weights() -> None:
    tiny = tiny_tower(2, final_layernorm=True)
    runner = runner_of(tiny)
    images = [random_image(tiny.config, 4, 6)]
    (before,) = encode(runner, images)
    for weight in tiny.weights.values():
        weight.fill_(float("nan"))
    (after,) = encode(runner, [random_image(tiny.config, 4, 6)])
    assert torch.equal(before, after)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_bfloat16_error_is_within_twice_the_oracle_s(native: str) -> None:
    """Both against the oracle in float64 on the same (bfloat16) weights, in relative RMS."""
    rounded = tiny_tower(5, dtype=torch.bfloat16, hidden_size=96, num_hidden_layers=4)
    images = [random_image(rounded.config, rows, columns) for rows, columns in ((16, 16), (8, 10), (2, 4), (16, 16))]
    images = [EncoderItem(image.grid, image.patches.bfloat16()) for image in images]
    ours = encode(runner_of(rounded, EncoderOptions(dtype=torch.bfloat16, graphs="off", native=native)), images)
    theirs = rounded.features(images)
    exact = tiny_tower(5, hidden_size=96, num_hidden_layers=4)
    with torch.no_grad():
        for name, weight in exact.oracle.named_parameters():
            weight.copy_(rounded.oracle.get_parameter(name))
    exact.oracle.double()
    truth = exact.features(images)

    def rms(rows: list[torch.Tensor]) -> float:
        return float((torch.cat(rows).double() - torch.cat(truth)).pow(2).mean().sqrt())

    assert rms(ours) <= 2 * rms(theirs)


@pytest.mark.parametrize("grid", [(4, 6), (10, 10), (2, 30), (26, 4), (20, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_equal_the_oracle_s(grid: tuple[int, int], dtype: torch.dtype) -> None:
    tiny = tiny_tower(4, dtype=dtype)
    embeddings = tiny.oracle.vision_model.embeddings
    with torch.no_grad():
        expected = embeddings._interpolate_position_embedding(grid, dtype)[0]
    tower = tiny.config.build(tiny.weights.items(), dtype=dtype, device=torch.device("cpu"))
    assert torch.equal(tower.positions(grid), expected)


def test_interpolation_is_of_the_square_cropped() -> None:
    table = torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.equal(interpolate_positions(table, (2, 4), torch.float32)[:, 0], torch.arange(8.0))
