"""Every option gives the plain answers on models with gated delta rule layers of several shapes."""

from __future__ import annotations

from typing import Any

import pytest
from speculation import AXES, Answers, answers, pairwise
from tiny_decoder import delta_config

from decoder.config import DecoderConfig

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "alone": ("GG", {}),
    "mixed": ("G-*G*", {"num_key_heads": 1, "num_value_heads": 3, "key_head_dim": 9, "value_head_dim": 21}),
    "experts": ("GE*GE", {"num_value_heads": 2, "value_head_dim": 40, "conv_kernel": 3}),
}
CASES = pairwise(AXES | {"shape": tuple(SHAPES), "draft_tokens": (1, 3, 7), "seed": (0, 1)})


def config_of(shape: str) -> DecoderConfig:
    pattern, delta = SHAPES[shape]
    return delta_config(pattern, delta, num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], Answers]:
    """Operation by operation, uncached, without drafts."""
    return {
        (shape, seed): answers(config=config_of(shape), seed=seed, state_cache="none", native="off")
        for shape in SHAPES
        for seed in (0, 1)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[name]) for name in sorted(case)))
def test_any_options_equal_plain(case: dict[str, Any], plain: dict[tuple[str, int], Answers]) -> None:
    chosen = dict(case)
    shape = chosen.pop("shape")
    expected = plain[shape, case["seed"]]
    found = answers(config=config_of(shape), known=expected.drawn, **chosen)
    assert found.drawn == expected.drawn
    for name, logprobs in expected.logprobs.items():
        assert found.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
    if case["graphs"] == "on":
        names = [name for name, count in found.stats.items() if count]
        assert not [name for name in names if name.startswith("eager_")]
        assert bool([n for n in names if n.startswith("replays_verify")]) == (case["speculative"] != "none")
    if case["speculative"] == "ngram":
        assert sum(found.stats[f"accepted_{place + 1}"] for place in range(case["draft_tokens"])) > 20
