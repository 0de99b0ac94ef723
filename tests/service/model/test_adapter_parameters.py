"""Adapters of parameters of experts, by the names in `target_parameters`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import linear_layers, pair, random_tensor, write_adapter
from qwen_checkpoint import make_qwen
from text_families import make_text_checkpoint
from tiny_checkpoint import make_checkpoint

from families import CheckpointError
from service.model.adapter import Adapter
from service.model.checkpoint import Checkpoint

MODELS: dict[str, Callable[[Path], Any]] = {
    "one by one": lambda path: make_checkpoint(path, 3, vision=False, text={"pattern": "M*-E"}),
    "other names": lambda path: make_text_checkpoint(path, "granitemoehybrid", 1),
    "stacks": lambda path: make_qwen(path, 4, moe=True, tied=False, one_by_one=False),
}
"""How the files have the experts, which are stacks in transformers' classes."""


@pytest.mark.parametrize("model", MODELS)
def test_a_parameter_of_the_model_needs_tensors(tmp_path: Path, model: str) -> None:
    """Otherwise a part of what was trained would be missing. Other names are ignored, as those of modules are."""
    tiny = MODELS[model](tmp_path / "model")
    layer, weight = next((name, weight) for name, weight in linear_layers(tiny.model).items() if ".layers." in name)
    tensors = pair(layer, weight)
    stack = next(name for name, _ in tiny.model.named_parameters() if name.endswith("experts.down_proj"))

    def opened(*parameters: str) -> Checkpoint:
        adapter = write_adapter(tmp_path / "adapter", tensors, target_parameters=list(parameters))
        return Checkpoint(tiny.path, adapter=Adapter(adapter))

    for named in ("experts.down_proj", "down_proj", stack):
        with pytest.raises(CheckpointError, match=rf"target_parameters names '{re.escape(named)}', and .* are of \w"):
            opened("experts.w7", named)
    assert opened("experts.w7", "xperts.down_proj", "down_proj.weight.x").merges


def test_names_may_end_alike(tmp_path: Path) -> None:
    """A name for each layer, as PEFT's helpers list them."""
    text = {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    tiny = make_qwen(tmp_path / "model", 4, moe=True, tied=False, text=text)
    stacks = {name: stack for name, stack in tiny.model.named_parameters() if name.endswith("experts.down_proj")}
    tensors = {}
    for name, stack in [*stacks.items()][:2]:
        experts, out, inner = stack.shape
        module = name.rpartition(".")[0]
        tensors |= {f"{module}.lora_A.weight": random_tensor(4 * experts, inner)}
        tensors |= {f"{module}.lora_B.weight": random_tensor(out, 4 * experts)}
    names = [*stacks][:2]
    for named in (names, names[::-1], [*names, "experts.down_proj"]):
        adapter = write_adapter(tmp_path / "adapter", tensors, target_parameters=named)
        merges = Checkpoint(tiny.path, adapter=Adapter(adapter)).merges
        assert merges is not None and len(merges) == 2
