"""What benchmarks compute themselves: the lower bound of a workload's time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_decoder import tiny_config

from benchmarks.floors import Floor, Machine, Tower
from benchmarks.workloads import Workload
from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention, Experts, GatedDelta, Mlp
from decoder.layers.spec import Layer

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
    state = 2 * 4 * 4 * 8 * 16  # read and written, float32, 4 heads of 8 x 16
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
    assert 1.50e9 < bytes_read < 1.56e9, "1.5 GB of weights, 2 x 18 MiB of states"


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
