"""Small models with random weights and byte-level tokenizers, whose answers are random text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import saccade
from benchmarks.byte_tokenizer import add_tokenizer
from benchmarks.qwen_model import SMALL_TEXT, tiny_qwen_model
from service.model.checkpoint import open_checkpoint

_ENDINGS = ('"', '"}', '"]', '",', "}", "]", ",", "}}", "}]", "]}", "]]", "},", "],", "\n")
"""Texts that end values. Those that are a single token of a model are made likelier."""
_BIAS = 7.0


def demo_shape(folder: Path) -> Path:
    """The embedded model's shapes and tokenizer (nemotron_h)."""
    from safetensors.torch import load_file, save_file

    source, path = open_checkpoint("demo", None).path, folder / "nemotron_h-random"
    if (path / "complete").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not (path / file.name).exists():
            (path / file.name).symlink_to(file)
    torch.manual_seed(0)
    for file in source.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() > 1 and weight.is_floating_point():
                weights[name] = (torch.randn(weight.shape) * 0.05).to(weight.dtype)
        save_file(weights, path / file.name, metadata={"format": "pt"})
    (path / "complete").touch()
    return path


def qwen_shape(folder: Path) -> Path:
    """A tiny model of two layers (qwen3_5)."""
    model, path = tiny_qwen_model(folder), folder / "qwen3_5-tiny-written"
    path.mkdir(exist_ok=True)
    for file in model.iterdir():
        if not file.name.startswith("tokenizer") and not (path / file.name).exists():
            (path / file.name).symlink_to(file)
    add_tokenizer(path, SMALL_TEXT["vocab_size"])
    return path


FAMILIES: dict[str, Callable[[Path], Path]] = {"nemotron_h": demo_shape, "qwen3_5": qwen_shape}


def ending_bias(client: saccade.Client) -> dict[int, float]:
    """A logit bias for the tokens that end values, without which hardly any answer would end."""
    found = (list(client.tokenize(text, raw=True).token_ids) for text in _ENDINGS)
    return {ids[0]: _BIAS for ids in found if len(ids) == 1}
