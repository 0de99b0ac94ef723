"""Every option gives the plain answers on models with gated attention, image positions, and a similar head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gated_decoder import gated_config
from speculation import AXES, Answers, answers, pairwise

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Experts

DELTA, MAMBA, ATTENTION = "G-*-G*", "M*E", "*-*"
CASES = pairwise(AXES | {"pattern": (DELTA, MAMBA, ATTENTION), "draft_tokens": (1, 3), "seed": (0, 1)})


def config_of(pattern: str) -> DecoderConfig:
    """If the layers have a mixture of experts, the head has one too."""
    config = gated_config(pattern, mtp=True)
    mixture = next((mixer for mixer in config.mixers if isinstance(mixer, Experts)), None)
    return config if mixture is None else replace(config, mtp=(config.mtp[0], mixture))


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], Answers]:
    """Operation by operation, uncached, without drafts."""
    return {
        (pattern, seed): answers(config=config_of(pattern), seed=seed, state_cache="none", native="off")
        for pattern in (DELTA, MAMBA, ATTENTION)
        for seed in (0, 1)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[name]) for name in sorted(case)))
def test_any_options_equal_plain(case: dict[str, Any], plain: dict[tuple[str, int], Answers]) -> None:
    pattern = case.pop("pattern")
    expected = plain[pattern, case["seed"]]
    found = answers(config=config_of(pattern), known=expected.drawn, **case)
    assert found.drawn == expected.drawn
    for name, logprobs in expected.logprobs.items():
        assert found.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
    if case["speculative"] == "ngram":
        assert sum(found.stats[f"accepted_{place + 1}"] for place in range(case["draft_tokens"])) > 20
    elif case["speculative"] == "mtp":
        assert found.stats["drafted_1"] > 20
