"""Random nemotron_h decoders of several sizes, written on first use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.models import KINDS, TEXT, text_model
from benchmarks.random_weights import plain, write_shards
from service.model.modelconfig import load_config

SMALLEST = "116m"
LONGEST = 65536
"""Positions of the larger models, for long prompts."""
_WIDE: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "mamba_num_heads": 64, "n_groups": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
_WIDER: dict[str, Any] = {
    "hidden_size": 3072, "intermediate_size": 12288, "mamba_num_heads": 96, "n_groups": 8, "num_attention_heads": 48,
    "num_key_value_heads": 8,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 88, "num_experts_per_tok": 6, "moe_intermediate_size": 1024,
    "moe_shared_expert_intermediate_size": 2688,
}  # fmt: skip
_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "600m": ("M-M-M-M*-M-M-M-", _WIDE),
    "1500m": ("M-M-M-M-M*-M-M-M-M-", _WIDER),
    "moe": ("MEMEMEM*EMEMEME", {**_WIDE, **_EXPERTS}),
}
"""For each size, the letters of its layers (`models.KINDS`) and the fields that differ from the 116 M model's."""
SHAPES = (SMALLEST, *_SIZES)


def fields(shape: str) -> dict[str, Any]:
    """Fields of the configuration of a shape other than the smallest."""
    pattern, other = _SIZES[shape]
    return {**TEXT, "max_position_embeddings": LONGEST, **other, "layers_block_type": [KINDS[k] for k in pattern]}


def sized_model(shape: str, folder: Path) -> Path:
    """The decoder of a shape in bfloat16: 0.1, 0.6 or 1.5 billion parameters, or 3 billion with experts, of which a
    token uses 0.6. An existing checkpoint is kept."""
    if shape == SMALLEST:
        return text_model(folder)
    path = folder / f"nemotron-h-{shape}"
    if not (path / "complete").exists():
        write(path, fields(shape))
    return path


def write(path: Path, text: dict[str, Any]) -> None:
    """Writes a checkpoint with these fields of the configuration and random weights."""
    from transformers import NemotronHConfig

    config = NemotronHConfig(**text, architectures=["NemotronHForCausalLM"], dtype="bfloat16")
    config.save_pretrained(path)
    write_shards(path, [plain(*each) for each in _tensors(path)])
    (path / "complete").touch()


def _tensors(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the checkpoint's tensors as they are published: one for each expert."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in load_config(path).decoder.expected_weights().items():
        published = "backbone." + name.removeprefix("model.") if name.startswith("model.") else name
        stack, _, last = published.rpartition(".")
        if stack.endswith(".mixer.experts"):
            found += [(f"{stack}.{expert}.{last}.weight", shape[1:]) for expert in range(shape[0])]
        else:
            found.append((published, shape))
    return found


def parameters(path: Path) -> int:
    """Number of parameters of a checkpoint's decoder."""
    return sum(math.prod(shape) for shape in load_config(path).decoder.expected_weights().values())
