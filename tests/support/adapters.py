"""LoRA adapters as PEFT writes them, from the definition of the format, and models into which they have been merged."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

PREFIX = "base_model.model."


def write_adapter(path: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Writes a folder. `tensors`: by their names without PEFT's prefix."""
    path.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "peft_version": "0.21.2", "target_modules": [], **config}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    named = {PREFIX + name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(named, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.3


def pair(module: str, weight: Tensor, rank: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """lora_A and lora_B of a linear layer with this weight."""
    out, inner = weight.shape
    return {
        f"{module}.lora_A.weight": random_tensor(rank, inner, seed=seed),
        f"{module}.lora_B.weight": random_tensor(out, rank, seed=seed + 1),
    }


def product(tensors: Mapping[str, Tensor], module: str, scale: float = 6 / 4) -> Tensor:
    """What a pair adds to a weight."""
    return (tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]) * scale


def linear_layers(model: Any) -> dict[str, Tensor]:
    """Weights of all linear layers by module name, except those that are tied."""
    found = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    users = Counter([id(model.get_input_embeddings().weight), *map(id, found.values())])
    return {name: weight for name, weight in found.items() if users[id(weight)] == 1}


def resaved(base: Path, model: Any, path: Path, changes: Mapping[str, Tensor]) -> Path:
    """Writes the model with other values of some parameters beside the files of `base` that are not weights. `changes`:
    by the parameters' names."""
    changed = copy.deepcopy(model)
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name, value in changes.items():
            parameters[name].copy_(value)
    path.mkdir()
    for file in base.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, path)
    changed.save_pretrained(path)
    return path
