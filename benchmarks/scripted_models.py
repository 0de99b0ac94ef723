"""Random checkpoints whose text is known: each token determines the next one, and the MTP head errs after known tokens.

All weights of the shape exist and are read, so a step takes as long as a trained model's. The layers add almost nothing
to the embedding of the last token; the vocabulary projection maps that embedding to the next token. So ids form cycles:
short ones are text that repeats, long ones are text that does not. In `branching` text each token has two equally
likely successors, so that an earlier occurrence predicts the next token half of the time.

One number of an embedding decides whether the multi-token prediction (MTP) head errs after this token; the model's own
logits do not read it. For each rate of `RATES` there is a text in which the head is right after that share of tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

RATES = (1.0, 0.8, 0.6, 0.4, 0.0)
"""Shares of the head's drafts that are accepted."""
FIRST = 10
"""The lowest id that occurs in a text."""
LOGIT = 40.0
"""The logit of the next token; all others are below a quarter of it."""
QUIET = 1e-3
"""Scale of what the layers add."""
LOUD = 4.0
"""Scale of the wrong embedding that the head reads after a token where it errs."""

NEMOTRON_H: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 8192, "ssm_state_size": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "chunk_size": 128, "max_position_embeddings": 8192, "time_step_min": 1e-9,
    "layers_block_type": [
        {"M": "linear_attention", "*": "full_attention", "-": "mlp"}[letter] for letter in "M-M-M*-M-M-M*-M-"
    ],
}  # fmt: skip
"""0.6 B parameters."""


@dataclass(frozen=True)
class Script:
    """Which ids make which text. `group`: tokens of a short cycle; `groups`: number of short cycles, and of branching
    texts; `long`: tokens of each long cycle."""

    group: int = 24
    groups: int = 16
    long: int = 2000

    def text(self, name: str, request: int, count: int) -> list[int]:
        """The first `count` ids of a request's text; for `branching`, one of the possible texts."""
        ids = self.cycle(name, request)
        start = 0 if name in ("repeating", "branching") else request * len(ids) // self.groups
        return [ids[(start + index) % len(ids)] for index in range(count)]

    def cycle(self, name: str, request: int) -> list[int]:
        """The ids of a text in order: `repeating`, `branching`, or `rate 0.8` for a rate of `RATES`."""
        first = FIRST
        if name in ("repeating", "branching"):
            first += ((name == "branching") * self.groups + request) * self.group
            return list(range(first, first + self.group))
        first += 2 * self.groups * self.group + RATES.index(float(name.removeprefix("rate "))) * self.long
        return list(range(first, first + self.long))

    def next_tokens(self, vocab: int) -> Tensor:
        """`[vocab, 2]`: both successors of each id, which are equal except in `branching` text; an id that is in no
        text is followed by itself."""
        found = torch.arange(vocab)[:, None].repeat(1, 2)
        draw = random.Random(0)
        for name in ("repeating", "branching"):
            for request in range(self.groups):
                ids = self.cycle(name, request)
                other = draw.sample(ids, len(ids)) if name == "branching" else ids[1:] + ids[:1]
                found[ids] = torch.tensor([ids[1:] + ids[:1], other]).T
        for rate in RATES:
            ids = self.cycle(f"rate {rate}", 0)
            found[ids] = torch.tensor(ids[1:] + ids[:1])[:, None]
        return found

    def errs(self, vocab: int) -> Tensor:
        """`[vocab]`: 1 for an id after which the head errs, else 0. Each ten consecutive ids have the same share."""
        found, draw = torch.zeros(vocab), random.Random(1)
        for rate in RATES:
            ids = self.cycle(f"rate {rate}", 0)
            for first in range(0, len(ids), 10):
                ten = ids[first : first + 10]
                found[draw.sample(ten, round((1 - rate) * len(ten)))] = 1
        return found


def nemotron_model(folder: Path, shape: Mapping[str, Any] = NEMOTRON_H, script: Script = Script()) -> Path:
    """A `nemotron_h` checkpoint in bf16 with a head of attention and an MLP."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    path = folder / "nemotron-h-0.6b-scripted"
    if (path / "complete").exists():
        return path
    torch.manual_seed(0)
    model = NemotronHForCausalLM(NemotronHConfig(**shape)).bfloat16()
    weights = dict(model.state_dict())
    attention = shape["layers_block_type"].index("full_attention")
    parts = {0: f"model.layers.{attention}.", 1: f"model.layers.{shape['layers_block_type'].index('mlp')}."}
    for index, prefix in parts.items():
        weights |= _like(weights, prefix, f"mtp.layers.{index}.")
    ones = torch.ones(shape["hidden_size"], dtype=torch.bfloat16)
    weights |= {f"mtp.layers.{name}.weight": ones.clone() for name in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    _script(weights, script, "model.embeddings.weight", "mtp.layers.0.eh_proj.weight")
    heads = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "mlp"]}
    return _save(path, model.config, weights, heads)


def qwen_model(folder: Path, shape: Mapping[str, Any] | None = None, script: Script = Script()) -> Path:
    """A text-only `qwen3_5` checkpoint in bf16, by default of the released 0.8B shape. Its vocabulary projection is not
    tied to the embeddings; this takes more memory, but a step reads the same number of bytes."""
    from transformers import Qwen3_5ForCausalLM
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    from benchmarks.qwen_model import TEXT

    path = folder / "qwen3_5-0.8b-scripted"
    if (path / "complete").exists():
        return path
    shape = {**(TEXT if shape is None else shape), "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**shape)
    model: Any = Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16)
    weights = dict(model.state_dict())
    attention = shape["layer_types"].index("full_attention")
    weights |= _like(weights, f"model.layers.{attention}.", "mtp.layers.0.")
    zeros = torch.zeros(shape["hidden_size"], dtype=torch.bfloat16)  # norms store their weight minus 1
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    weights |= {f"mtp.{name}.weight": zeros.clone() for name in norms}
    _script(weights, script, "model.embed_tokens.weight", "mtp.fc.weight")
    return _save(path, config, weights, {"mtp_num_hidden_layers": 1})


def _like(weights: Mapping[str, Tensor], prefix: str, target: str) -> dict[str, Tensor]:
    """Copies of a layer's weights under another prefix."""
    return {target + name.removeprefix(prefix): w.clone() for name, w in weights.items() if name.startswith(prefix)}


def _script(weights: dict[str, Tensor], script: Script, embedding: str, fuse: str) -> None:
    """Sets the embedding, the vocabulary projection and the head's first product, and scales down the layers'
    outputs."""
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights[name] = weight * QUIET
    vocab, hidden = weights[embedding].shape
    table = torch.randn(vocab, hidden)
    table[:, -1] = 0
    table *= hidden**0.5 / table.norm(dim=1, keepdim=True)
    head = torch.zeros(vocab, hidden)
    for column in script.next_tokens(vocab).T:
        head.index_add_(0, column, table * (LOGIT / hidden / 2))
    branching = torch.tensor([i for request in range(script.groups) for i in script.cycle("branching", request)])
    for column in script.next_tokens(vocab).T:  # each of two successors gets the logit of an only one
        head.index_add_(0, column[branching], table[branching] * (LOGIT / hidden / 2))
    wrong = table[FIRST]
    table[:, -1] = script.errs(vocab)
    first = torch.eye(hidden)
    first[:, -1] = LOUD * wrong
    bf16 = torch.bfloat16
    weights[embedding], weights["lm_head.weight"] = table.to(bf16), head.to(bf16)
    weights[fuse] = torch.cat((first, torch.zeros(hidden, hidden)), 1).to(bf16)


def _save(path: Path, config: Any, weights: dict[str, Tensor], heads: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | heads, indent=1))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")
    (path / "complete").touch()
    return path
