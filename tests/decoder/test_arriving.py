"""Weights are read while layers are built, a few at a time, and an error lists all problems."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from tiny_decoder import make_runner, random_weights, tiny_config


def test_weights_of_one_layer_are_gone_before_the_next_one_is_built() -> None:
    config = tiny_config("M-M-M-M-")
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in random_weights(config, dtype=torch.bfloat16):
            most = max(most, sum(ref() is not None for ref in alive))
            alive.append(weakref.ref(tensor))
            yield name, tensor

    make_runner(config, watched(), dtype=torch.bfloat16)
    largest = max(len(layer.weights(config.hidden_size)) for layer in config.layers)
    assert most <= 2 * largest + 2 < len(alive) / 2


@pytest.mark.parametrize("as_list", [True, False])
def test_everything_that_is_wrong_is_listed(as_list: bool) -> None:
    config = tiny_config("M-")

    def spoiled() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in random_weights(config):
            if name == "model.layers.0.norm.weight":
                yield name, tensor[:-1]
            elif name != "model.layers.1.mixer.up_proj.weight":
                yield name, tensor
        yield "model.layers.7.norm.weight", torch.ones(3)

    with pytest.raises(ValueError) as refused:
        make_runner(config, list(spoiled()) if as_list else spoiled())
    message = str(refused.value)
    assert "missing model.layers.1.mixer.up_proj.weight" in message
    assert "unknown model.layers.7.norm.weight" in message
    assert "model.layers.0.norm.weight has shape" in message


def test_a_list_may_have_any_order() -> None:
    config = tiny_config("M*-E")
    weights = list(random_weights(config))
    make_runner(config, weights[::-1])
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        make_runner(config, [item for item in weights if item[0] != "lm_head.weight"])
