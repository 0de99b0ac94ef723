"""All combinations of drafts, cache, chunk, preemption, graphs, compiled code and overlap with constraints: 20 tokens
of eight requests, one for each kind of constraint in `tests/support/constrained.py`.

Each combination runs twice: each kind is greedy in one run and sampled in the other. The layer pattern and the method
of undoing drafts alternate from combination to combination. Comparison as in `product`.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from benchmarks.equal_answers import Comparison
from benchmarks.soak import Outcome
from benchmarks.soak_parts.product import PATTERNS, combinations, models_of

OUTPUT = 20
DRAFTS: dict[str, dict[str, str]] = {
    "none": {"forced_tokens": "off"},
    "ngram": {"speculative": "ngram", "forced_tokens": "off"},
    "mtp": {"speculative": "mtp", "forced_tokens": "off"},
    "forced": {"forced_tokens": "on"},
    "ngram and forced": {"speculative": "ngram", "forced_tokens": "on"},
    "mtp and forced": {"speculative": "mtp", "forced_tokens": "on"},
}
"""Options by the source of drafts."""


def run(scale: float, family: str = "nemotron_h") -> Outcome:
    """The outcome's numbers list the failed combinations with their differences. `ValueError` for an unknown family."""
    models = models_of(family)
    from constrained import KINDS
    from speculation import AXES, answers

    torch.set_num_threads(1)
    kinds = list(KINDS)
    names = ("state_cache", "max_chunk", "preempted", "graphs", "native", "overlap")
    axes: dict[str, Any] = {"drafts": tuple(DRAFTS), **{name: AXES[name] for name in names}, "first": (0, 1)}

    def ask(pattern: str, first: int, **options: Any) -> Any:
        spread = kinds[first:] + kinds[:first]  # requests of even numbers are greedy, the others are sampled
        return answers(**models[pattern], count=len(kinds), output=OUTPUT, constrained=spread, **options)

    plain = {
        (pattern, first): functools.partial(ask, pattern, first, state_cache="none", native="off")
        for pattern in models for first in axes["first"]
    }  # fmt: skip
    expected = {of: made() for of, made in plain.items()}
    cases, draw = combinations(axes, scale), random.Random(0)
    comparison = Comparison(len(cases))
    for case in cases:
        of = draw.choice(PATTERNS[family]), case["first"]
        rest = {"spec_state": draw.choice(AXES["spec_state"]), "draft_tokens": draw.choice((2, 7))}
        options = {name: case[name] for name in names} | DRAFTS[case["drafts"]] | rest
        other = functools.partial(ask, *of, known=expected[of].drawn, **options)
        comparison.check({**case, **rest, "pattern": of[0]}, expected[of], plain[of], other)
    ends = [reason for answer in expected.values() for _, reason in answer.drawn.values()]
    return comparison.outcome(
        family=family,
        axes={name: list(values) for name, values in axes.items()},
        kinds=kinds,
        ends={str(reason): ends.count(reason) for reason in sorted(set(ends), key=str)},
    )
