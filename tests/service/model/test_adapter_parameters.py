"""Adapters that name parameters of experts (`target_parameters`) of which their file has nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapters import linear_layers, pair, write_adapter
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
