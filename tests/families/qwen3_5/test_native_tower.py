"""The tower in compiled code compared with the same tower computed operation by operation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from compiled import needs_compiled
from qwen_vision import TinyQwen, random_grids, random_item, tiny_qwen
from towers import assert_same_bits_in_any_company, encode, rms

from encoder.item import EncoderItem
from encoder.native import scratch_sizes
from encoder.plan import describe
from encoder.runner import EncoderOptions, EncoderRunner
from kernels.linear import Quantised, quantise

pytestmark = needs_compiled
SIZES: list[dict[str, Any]] = [
    {"hidden_size": 128, "num_heads": 2},
    {"hidden_size": 144, "num_heads": 2, "hidden_act": "gelu"},
    {"hidden_size": 36, "num_heads": 3, "patch_size": 8},
    {"hidden_size": 80, "num_heads": 1, "spatial_merge_size": 3, "temporal_patch_size": 3},
    {"hidden_size": 24, "num_heads": 6, "depth": 3, "spatial_merge_size": 1},
]


def make(tiny: TinyQwen, dtype: torch.dtype, **options: Any) -> EncoderRunner:
    given: dict[str, Any] = {"graphs": "off", "native": "on", **options}
    return EncoderRunner(tiny.config, EncoderOptions(dtype=dtype, **given), tiny.weights.items())


def mixed(tiny: TinyQwen, seed: int = 0) -> list[EncoderItem]:
    grids = random_grids(random.Random(seed), 6, 8, tiny.config.merge_size)
    items = [random_item(tiny.config, grid, place, pairs=place % 3) for place, grid in enumerate(grids)]
    items += [random_item(tiny.config, (tiny.config.merge_size * 12, tiny.config.merge_size * 15), 9)]
    return items


@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_compiled_towers_equal_the_operations(changes: dict[str, Any]) -> None:
    tiny = tiny_qwen(3, **changes)
    items = mixed(tiny)
    fast, slow = (encode(make(tiny, torch.float32, native=mode), items) for mode in ("on", "off"))
    for found, wanted in zip(fast, slow, strict=True):
        assert float((found - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())
    rounded, plain = (encode(make(tiny, torch.bfloat16, native=mode), items) for mode in ("on", "off"))
    assert rms(rounded, slow) <= 1.2 * rms(plain, slow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_an_image_gets_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    tiny = tiny_qwen(7, **SIZES[1])
    padded = make(tiny, dtype, graphs="on", graph_kinds=None, token_budgets=(64, 192))
    assert_same_bits_in_any_company(make(tiny, dtype), padded, mixed(tiny, 2))


def test_bytes_become_rows_as_floats_do() -> None:
    tiny = tiny_qwen(1, **SIZES[0])
    image = torch.randint(0, 256, (40, 64, 3), dtype=torch.uint8)
    rule, runner = tiny.config.image_rule, make(tiny, torch.float32)
    kept, floats = (rule.patchify(image, torch.float32, keep_bytes=keep) for keep in (True, False))
    (from_bytes,), (from_floats,) = encode(runner, [kept]), encode(runner, [floats])
    assert kept.patches.dtype == torch.uint8 and torch.equal(from_bytes, from_floats)


def test_scratch_is_what_the_plan_says() -> None:
    tiny = tiny_qwen(0)
    runner = make(tiny, torch.bfloat16)
    rows = describe(tiny.config, runner.budgets, torch.bfloat16)[-1].tower_rows
    assert runner.tower.native.bytes == sum(scratch_sizes(rows, tiny.config, torch.bfloat16))


@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "int8"])
@pytest.mark.parametrize("native", ["on", "off"])
def test_quantised_towers_give_the_rows_of_their_expanded_weights(kind: str, native: str) -> None:
    tiny = tiny_qwen(3, hidden_size=128, num_heads=2, intermediate_size=160)
    stored: dict[str, Any] = {
        name: quantise(weight, kind) if "blocks" in name and weight.dim() == 2 else weight
        for name, weight in tiny.weights.items()
    }
    expanded = {name: w.dequantise() if isinstance(w, Quantised) else w for name, w in stored.items()}
    items = mixed(tiny)
    options = EncoderOptions(dtype=torch.float32, graphs="off", native=native)
    found, exact = (encode(EncoderRunner(tiny.config, options, each.items()), items) for each in (stored, expanded))
    assert rms(found, exact) < 1e-5 * float(torch.cat(exact).square().mean().sqrt())
