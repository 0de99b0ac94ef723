"""All combinations of options that must not change an answer: 32 tokens of six requests, greedy and sampled, with
images.

The axes are those of `tests/support/speculation.py`; the test suite covers all pairs. Each combination runs on its own
random tiny model of the family (default: `nemotron_h`), with its own layer pattern and seed, and is compared with the
plain run of that model (`benchmarks.equal_answers`).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.equal_answers import Comparison
from benchmarks.soak import Outcome
from decoder.config import DecoderConfig

PATTERNS = {"nemotron_h": ("M-*EM*", "MM", "*E*-"), "qwen3_5": ("G-G-*-G-", "G-G-", "*EGE*E")}
"""Layer patterns: M Mamba-2, G gated delta rule, * attention, - MLP, E experts."""
SEEDS = (0, 1)
ROPE = {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}


def qwen_config(pattern: str) -> DecoderConfig:
    """A tiny decoder of that family, with its multi-token prediction head."""
    from qwen_checkpoint import random_text

    from families.qwen3_5.config import decoder_config

    moe, kinds = "E" in pattern, {"G": "linear_attention", "*": "full_attention"}
    types = [kinds[letter] for letter in pattern[::2]]
    shape = {
        "layer_types": types, "num_hidden_layers": len(types), "head_dim": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "hidden_size": 64, "mtp_num_hidden_layers": 1, "rope_parameters": ROPE,
    }  # fmt: skip
    return decoder_config(random_text(random.Random(0), moe=moe, **shape), moe=moe, tied=moe, axes=3)


def models_of(family: str) -> dict[str, dict[str, Any]]:
    """By pattern, the arguments of `answers` that select the model. `ValueError` for an unknown family."""
    if family not in PATTERNS:
        raise ValueError(f"family {family!r} is not one of {', '.join(PATTERNS)}")
    nemotron = family == "nemotron_h"
    return {of: {"pattern": of} if nemotron else {"config": qwen_config(of)} for of in PATTERNS[family]}


def combinations(axes: Mapping[str, Sequence[Any]], scale: float) -> list[dict[str, Any]]:
    """All combinations of the values of axes, or a random share of this size if `scale` is below 1."""
    every = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return every if scale == 1 else random.Random(0).sample(every, max(1, round(len(every) * scale)))


def run(scale: float, family: str = "nemotron_h") -> Outcome:
    """The outcome's numbers list the failed combinations with their differences. `ValueError` for an unknown family."""
    models = models_of(family)
    from speculation import AXES, answers

    torch.set_num_threads(1)
    axes = {**AXES, "pattern": PATTERNS[family]}
    plain = {
        (pattern, seed): functools.partial(answers, **model, seed=seed, state_cache="none")
        for pattern, model in models.items() for seed in SEEDS
    }  # fmt: skip
    expected = {of: ask() for of, ask in plain.items()}
    cases = combinations(axes, scale)
    comparison = Comparison(len(cases))
    for number, case in enumerate(cases):
        of = case["pattern"], number % len(SEEDS)
        given = {name: value for name, value in case.items() if name != "pattern"} | models[case["pattern"]]
        other = functools.partial(answers, seed=of[1], known=expected[of].drawn, **given)
        comparison.check({**case, "seed": of[1]}, expected[of], plain[of], other)
    return comparison.outcome(family=family, axes={name: list(values) for name, values in axes.items()})
