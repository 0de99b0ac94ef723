"""Adapters merged while weights are loaded, against checkpoints into which they were merged before."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import linear_layers, pair, product, random_tensor, resaved, write_adapter
from minicpm import make_minicpm
from qwen_checkpoint import NAMINGS, make_qwen
from qwen_vision import random_tower
from text_families import FAMILIES, make_text_checkpoint
from tiny_checkpoint import TinyCheckpoint, make_checkpoint
from torch import Tensor

from families import CheckpointError
from kernels.linear import Quantised
from service.model.adapter import Adapter
from service.model.checkpoint import EMBEDDINGS, HEAD, Checkpoint

Make = Callable[[Path], TinyCheckpoint]


def opened(model: Path, adapter: Path) -> Checkpoint:
    return Checkpoint(model, adapter=Adapter(adapter))


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All weights in float32, by native name, without prediction heads, which transformers' models do not have."""
    found = [*checkpoint.decoder_weights(), *checkpoint.vision_weights()]
    assert not any(isinstance(weight, Quantised) for _, weight in found)
    return {name: weight.float() for name, weight in found if not name.startswith("mtp.")}  # type: ignore[union-attr]


def check_equal(tiny: TinyCheckpoint, adapter: Path, changes: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The weights with the adapter are bit by bit those of a model with these parameters. Returns them."""
    expected = weights_of(Checkpoint(resaved(tiny.path, tiny.model, folder, changes)))
    found = weights_of(opened(tiny.path, adapter))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    return found


def qwen(**options: Any) -> Make:
    return lambda path: make_qwen(path, 4, tied=False, **options)


MODELS: dict[str, Make] = {
    **{name: lambda path, name=name: make_text_checkpoint(path, name, 1) for name in FAMILIES},  # type: ignore[misc]
    "nemotron_h": lambda path: make_checkpoint(path, 3, vision=False, text={"pattern": "M*-E"}),
    "nemotron_h_omni": lambda path: make_checkpoint(path, 3, text={"pattern": "M*-E"}),
    "nemotron_h_omni-native": lambda path: make_checkpoint(path, 3, naming="native", text={"pattern": "M*-E"}),
    **{f"qwen3_5-{naming}": qwen(naming=naming, moe=False) for naming in NAMINGS},
    "qwen3_5_moe": qwen(moe=True, one_by_one=False),
    "qwen3_5_moe-one-by-one": qwen(moe=True, one_by_one=True),
    "qwen3_5-vision": qwen(moe=False, vision=random_tower(random.Random(4))),
}


@pytest.mark.parametrize("model", MODELS)
def test_all_linear_layers_of_a_model(tmp_path: Path, model: str) -> None:
    """The adapter is on the modules of the transformers class, whatever names and parts the files have."""
    tiny = MODELS[model](tmp_path / "model")
    layers = linear_layers(tiny.model)
    tensors = {name: value for layer in layers for name, value in pair(layer, layers[layer]).items()}
    adapter = write_adapter(tmp_path / "adapter", tensors)
    changes = {f"{layer}.weight": weight + product(tensors, layer) for layer, weight in layers.items()}
    found = check_equal(tiny, adapter, changes, tmp_path / "merged")
    before = weights_of(Checkpoint(tiny.path))
    assert sum(not torch.equal(found[name], before[name]) for name in before) >= len(layers)
