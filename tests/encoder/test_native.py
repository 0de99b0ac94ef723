"""The tower in compiled code compared with the same tower computed operation by operation."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from tiny_encoder import TinyTower, random_image, relative_error, tiny_tower
from towers import assert_same_bits_in_any_company, encode, rms

from encoder.item import IMAGE, EncoderItem
from encoder.native import scratch_sizes
from encoder.pieces import finish
from encoder.plan import describe
from encoder.runner import EncoderOptions, EncoderRunner
from families.nemotron_h_omni.tower import RadioTower
from families.nemotron_h_omni.vision import RadioVision
from kernels.activation_names import COMPILED

pytestmark = needs_compiled
GRIDS = [(4, 6), (2, 2), (12, 10), (2, 14), (4, 6), (16, 16), (8, 8), (2, 2), (10, 2)]


def make(tiny: TinyTower, dtype: torch.dtype = torch.bfloat16, **options: Any) -> EncoderRunner:
    given: dict[str, Any] = {"graphs": "off", "native": "on", **options}
    return EncoderRunner(tiny.config, EncoderOptions(dtype=dtype, **given), tiny.weights.items())


def sample_items(config: RadioVision, dtype: torch.dtype, grids: list[tuple[int, int]] = GRIDS) -> list[EncoderItem]:
    made = [random_image(config, *grid, seed=seed) for seed, grid in enumerate(grids)]
    return [EncoderItem(image.grid, image.patches.to(dtype)) for image in made]


def random_changes(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 3, 5])
    return {
        "hidden_size": heads * rng.choice([8, 14, 16, 32, 64, 80]),
        "num_attention_heads": heads,
        "num_hidden_layers": rng.randint(1, 3),
        "mlp_ratio": rng.choice([2.0, 4.0]),
        "hidden_act": rng.choice(sorted(COMPILED)),
        "use_swiglu_ffn": rng.random() < 0.3,
        "qkv_bias": rng.random() < 0.7,
        "final_layernorm": rng.random() < 0.5,
        "num_cls_tokens": rng.randint(0, 3),
        "num_registers": rng.randint(0, 7),
        "text_hidden_size": rng.randint(10, 80),
        "projector_hidden_size": 2 * rng.randint(10, 80),
        "video_temporal_patch_size": rng.choice([2, 3]),
    }


@pytest.mark.parametrize("seed", range(12))
def test_random_towers_equal_the_operations(seed: int) -> None:
    tiny = tiny_tower(seed, **random_changes(seed))
    images = sample_items(tiny.config, torch.float32)
    fast, slow = (encode(make(tiny, torch.float32, native=mode), images) for mode in ("on", "off"))
    assert relative_error(torch.cat(fast), torch.cat(slow)) <= 1e-5
    images = sample_items(tiny.config, torch.bfloat16)
    fast, plain = (encode(make(tiny, native=mode), images) for mode in ("on", "off"))
    assert rms(fast, slow) <= 1.2 * rms(plain, slow)


@pytest.mark.parametrize("activation", sorted(COMPILED))
def test_every_activation(activation: str) -> None:
    tiny = tiny_tower(2, hidden_act=activation)
    images = sample_items(tiny.config, torch.float32, GRIDS[:3])
    fast, slow = (encode(make(tiny, torch.float32, native=mode), images) for mode in ("on", "off"))
    assert relative_error(torch.cat(fast), torch.cat(slow)) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_an_image_gets_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    tiny = tiny_tower(7, final_layernorm=True, hidden_size=192)
    images = sample_items(tiny.config, dtype)
    assert_same_bits_in_any_company(make(tiny, dtype), make(tiny, dtype, graphs="on"), images)


def test_launches_between_two_layers_change_nothing() -> None:
    """Even a launch that is larger than the reserved scratch memory."""
    tiny = tiny_tower(3)
    runner = make(tiny, max_tokens_per_step=64)
    images = sample_items(tiny.config, torch.bfloat16, [(8, 8)])
    expected, small = encode(runner, images), encode(runner, sample_items(tiny.config, torch.bfloat16, [(2, 4)]))
    before = runner.tower.native.bytes
    out = [torch.empty_like(expected[0])]
    job = runner.begin(images, out)
    assert job.step(0.0)
    (again,) = encode(runner, sample_items(tiny.config, torch.bfloat16, [(2, 4)]))
    assert torch.equal(again, small[0])
    encode(runner, sample_items(tiny.config, torch.bfloat16, [(20, 20)]))
    while job.step(0.0):
        pass
    assert torch.equal(out[0], expected[0])
    assert runner.tower.native.bytes > before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_scratch_is_what_the_plan_says(dtype: torch.dtype) -> None:
    tiny = tiny_tower(0)
    runner = make(tiny, dtype)
    rows = describe(tiny.config, runner.budgets, dtype)[-1].tower_rows
    assert runner.tower.native.bytes == sum(scratch_sizes(rows, tiny.config, dtype))
    assert make(tiny, dtype, native="off").tower.native is None


def test_what_has_no_compiled_tower_says_why(caplog: pytest.LogCaptureFixture) -> None:
    tiny = tiny_tower(0, projector_hidden_size=57)
    reason = "projector_hidden_size 57 is odd"
    with pytest.raises(ValueError, match=f"native: 'on' is not possible: {reason}.*'auto' would work"):
        make(tiny)
    with caplog.at_level(logging.INFO, "encoder"):
        runner = make(tiny, native="auto")
    assert runner.tower.native is None and f"the encoder runs operation by operation: {reason}" in caplog.text
    assert make(tiny, torch.float32).tower.native is not None
    with pytest.raises(ValueError, match="native must be one of .*'maybe'"):
        EncoderOptions(native="maybe")


def test_no_tower_is_compiled_for_a_gpu() -> None:
    with pytest.raises(ValueError, match="the encoder is on meta"):
        RadioTower(replace(RadioVision()), [], dtype=torch.bfloat16, device=torch.device("meta"), native="on")


def test_offsets_that_leave_rows_out_are_refused() -> None:
    tiny = tiny_tower(1)
    runner = make(tiny)
    batch = runner.lanes["image"].batch(sample_items(tiny.config, torch.bfloat16, [(2, 4), (4, 4)]))
    for wrong in ([0, 13], [1, 34], [0, 40, 34]):
        offsets = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match="sequence"), torch.inference_mode():
            finish(runner.tower.pieces(replace(batch, cu_seqlens=offsets), kind=IMAGE))
