"""All combinations of options that must not change an answer: 32 tokens of six requests, greedy and sampled, with
images.

The axes are those of `tests/support/speculation.py`; the test suite covers all pairs. Each combination runs on its own
random tiny model of the family (default: `nemotron_h`), with its own layer pattern and seed, and is compared with the
plain run of that model. A different token is accepted if the decision margin was less than ten times the difference of
the two paths' logits. Such cases are listed; more than one request in a hundred is a failure.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak import Outcome
from decoder.config import DecoderConfig

PATTERNS = {"nemotron_h": ("M-*EM*", "MM", "*E*-"), "qwen3_5": ("G-G-*-G-", "G-G-", "*EGE*E")}
"""Layer patterns: M Mamba-2, G gated delta rule, * attention, - MLP, E experts."""
SEEDS = (0, 1)
ROPE = {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
RARE = 0.01
TOLERANCE = 1e-4
"""Maximum difference of log-probabilities (natural logarithm)."""


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


def model_of(family: str, pattern: str) -> dict[str, Any]:
    """The arguments of `answers` that select the model."""
    return {"pattern": pattern} if family == "nemotron_h" else {"config": qwen_config(pattern)}


def combinations(scale: float, family: str) -> list[dict[str, Any]]:
    """All combinations, or a random share of this size if `scale` is below 1."""
    from speculation import AXES

    axes = {**AXES, "pattern": PATTERNS[family]}
    every = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return every if scale == 1 else random.Random(0).sample(every, max(1, round(len(every) * scale)))


def run(scale: float, family: str = "nemotron_h") -> Outcome:
    """The outcome's numbers list the failed combinations with their differences. `ValueError` for an unknown family."""
    if family not in PATTERNS:
        raise ValueError(f"family {family!r} is not one of {', '.join(PATTERNS)}")
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    from margins import excused
    from speculation import AXES, answers

    torch.set_num_threads(1)
    cases, models = combinations(scale, family), {pattern: model_of(family, pattern) for pattern in PATTERNS[family]}
    plain = {
        (pattern, seed): answers(**model, seed=seed, state_cache="none")
        for pattern, model in models.items() for seed in SEEDS
    }  # fmt: skip
    failed: list[dict[str, Any]] = []
    excuses: list[dict[str, Any]] = []
    requests = 0
    tokens, drafted, replays, preemptions, worst = 0, 0, 0, 0, 0.0
    for number, case in enumerate(cases):
        seed = number % len(SEEDS)
        expected = plain[case["pattern"], seed]
        given = {name: value for name, value in case.items() if name != "pattern"} | models[case["pattern"]]
        try:
            found = answers(seed=seed, known=expected.drawn, **given)
            wrong = [name for name, drawn in expected.drawn.items() if found.drawn.get(name) != drawn]
        except Exception as error:  # a combination that cannot run has failed, and the others still run
            failed.append({**case, "seed": seed, "error": repr(error)})
            continue
        for name in [name for name in wrong if found.drawn.get(name)]:
            mine, other = expected.drawn[name][0], found.drawn[name][0]
            at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
            if at is None:
                continue
            ok, error = excused(
                name, mine[:at], other[at],
                functools.partial(answers, **models[case["pattern"]], seed=seed, state_cache="none"),
                functools.partial(answers, seed=seed, known=expected.drawn, **given),
            )  # fmt: skip
            if ok:
                wrong.remove(name)
                excuses.append({**case, "seed": seed, "request": name, "token": at, "logit_difference": error})
        requests += len(expected.drawn)
        gaps = [
            abs(one - other)
            for name, of in expected.logprobs.items()
            if found.drawn.get(name) == expected.drawn[name]
            for one, other in zip(of, found.logprobs[name], strict=True)
        ]
        worst = max([worst, *gaps])
        if wrong or max(gaps, default=0.0) > TOLERANCE:
            failed.append({**case, "seed": seed, "requests": wrong, "logprobs": max(gaps, default=0.0)})
        tokens += sum(len(drawn) for drawn, _ in found.drawn.values())
        preemptions += found.stats["preemptions"]
        drafted += found.stats.get("drafted_1", 0)
        replays += sum(count for name, count in found.stats.items() if name.startswith("replays_"))
        if number % 100 == 99:
            print(f"  {number + 1} of {len(cases)}, {len(failed)} failed", file=sys.stderr, flush=True)
    numbers = {
        "family": family,
        "axes": {name: list(values) for name, values in {**AXES, "pattern": PATTERNS[family]}.items()},
        "combinations": len(cases),
        "failed": failed,
        "requests": requests,
        "excused": excuses,
        "tokens": tokens,
        "verified_steps": drafted,
        "replays": replays,
        "preemptions": preemptions,
        "largest_logprob_difference": worst,
    }
    return Outcome(not failed and len(excuses) <= RARE * requests, numbers)
