"""Attention with a sliding window and a gate per head: against transformers, and with every option of a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gated_decoder import gated_config
from speculation import Answers, answers, pairwise
from tiny_decoder import greedy_params, make_runner, random_weights, request, run, tiny_config, tokens
from torch import Tensor
from torch.nn import functional as F
from transformers import Lfm3Config
from transformers.models.lfm3.modeling_lfm3 import Lfm3Attention, Lfm3RotaryEmbedding

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention
from decoder.layers.spec import Layer
from kernels.rope import Rope

WINDOW = 6
PROMPT = [(7 * index) % 97 for index in range(29)]


def windowed_config(pattern: str = "*", window: int | None = WINDOW) -> DecoderConfig:
    """A `tiny_config` whose attentions have a window, a gate per head, positions, and norms of queries and keys."""
    plain = tiny_config(pattern)
    layers = [
        Layer((("mixer", replace(mixer, window=window, head_gate=True, rope=Rope(8, 1e4), qk_norm=1e-6)),))
        if isinstance(mixer, Attention) else layer
        for mixer, layer in zip(plain.mixers, plain.layers, strict=True)
    ]  # fmt: skip
    return replace(plain, layers=tuple(layers), position_axes=1)


@torch.no_grad()
def logprobs(config: DecoderConfig, weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """`[T, vocab]`: one layer of transformers' attention with a mask of this window, final norm and head."""
    [spec] = config.mixers
    assert isinstance(spec, Attention) and spec.window is not None
    published = Lfm3Config(
        hidden_size=spec.hidden_size, num_attention_heads=spec.num_attention_heads, head_dim=spec.head_dim,
        num_key_value_heads=spec.kv_heads, sliding_window=spec.window, norm_eps=spec.qk_norm, num_hidden_layers=1,
        layer_types=["sliding_attention"],
    )  # fmt: skip
    published._attn_implementation = "eager"
    attention = Lfm3Attention(published, 0).eval()
    prefix = "model.layers.0.mixer."
    mine = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    attention.load_state_dict(mine)
    x = weights["model.embeddings.weight"][torch.tensor(ids)]
    normed = F.rms_norm(x, x.shape[-1:], weights["model.layers.0.norm.weight"], config.norm_eps)[None]
    angles = Lfm3RotaryEmbedding(published)(normed, torch.arange(len(ids))[None], "sliding_attention")
    at = torch.arange(len(ids))
    hidden = (at > at[:, None]) | (at <= at[:, None] - spec.window)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
    x = x + attention(normed, angles, mask)[0][0]
    last = F.rms_norm(x, x.shape[-1:], weights["model.norm_f.weight"], config.norm_eps)
    return (last @ weights["lm_head.weight"].T).log_softmax(-1)


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("window", [1, WINDOW, 64])
def test_probabilities_are_those_of_transformers(window: int, native: str) -> None:
    config = windowed_config(window=window)
    weights = dict(random_weights(config))
    runner = make_runner(config, weights, native=native, max_chunk=5, page_size=4)
    events = run(runner, request("a", PROMPT, greedy_params(9, logprobs=0, prompt_logprobs=0, ignore_eos=True)))["a"]
    ids = PROMPT + tokens(events)
    expected = logprobs(config, weights, ids)
    found = [score.logprob for score in events[0].prompt_scores] + [event.logprob for event in events]
    wanted = expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-4)
    assert tokens(events) == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()


# -- whole models ------------------------------------------------------------------------------------------------------

SMALL = {"seed": 1, "count": 4, "output": 12}
CASES = pairwise(
    {
        "state_cache": ("none", "align", "all", "auto"),
        "speculative": ("none", "ngram", "mtp"),
        "spec_state": ("replay", "slots"),
        "max_chunk": (1, 7, None),
        "preempted": (False, True),
        "graphs": ("off", "on"),
        "native": ("auto", "off"),
    }
)


def mixed_config(window: int = WINDOW) -> DecoderConfig:
    """Layers with a window and without, next to layers with states; the drafting head has a window too."""
    config = gated_config("*M*S", mtp=True, gate=False, head_gate=True, window=window)
    [(name, mixer)] = config.layers[2].mixers
    assert isinstance(mixer, Attention)
    whole = Layer(((name, replace(mixer, window=None)),))
    return replace(config, layers=(*config.layers[:2], whole, *config.layers[3:]))


@pytest.fixture(scope="module")
def plain() -> Answers:
    """Operation by operation, uncached, without drafts."""
    return answers(config=mixed_config(), **SMALL, state_cache="none", native="off")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(case[name]) for name in sorted(case)))
def test_any_options_equal_plain(case: dict[str, Any], plain: Answers) -> None:
    found = answers(config=mixed_config(), **SMALL, known=plain.drawn, **case)
    assert found.drawn == plain.drawn
    for name, logprobs in plain.logprobs.items():
        assert found.logprobs[name] == pytest.approx(logprobs, abs=1e-4)
    if case["speculative"] == "ngram":
        assert found.stats["accepted_1"] > 10


@pytest.mark.parametrize("native", ["off", "auto"])
def test_only_a_window_shorter_than_the_context_changes_answers(native: str, plain: Answers) -> None:
    found = [answers(config=mixed_config(window), **SMALL, native=native) for window in (112, 1000)]
    assert found[0].logprobs == found[1].logprobs
    assert found[0].drawn != plain.drawn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"window": 0}, "window must be at least 1, not 0", id="empty"),
        pytest.param({"gate": True, "head_gate": True}, "gate and head_gate are both true", id="two-gates"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(32, **changes)
