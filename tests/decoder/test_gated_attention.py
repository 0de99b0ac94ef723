"""Attention with norms of queries and keys, rotary positions on several axes and a gate, against transformers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from gated_decoder import gated_config, grid_positions, interleaved, published_attention
from tiny_decoder import image, make_runner, random_weights, request, run, tokens
from torch import Tensor
from torch.nn import functional as F

from decoder.config import DecoderConfig
from decoder.layers.descriptions import Attention
from decoder.positions import Positions
from decoder.sampling import SamplingParams
from kernels.rope import Rope


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    section: tuple[int, int, int]
    """Frequencies of time, height and width."""
    bias: bool = False


SHAPES = [
    pytest.param(Shape(4, 2, 256, (11, 11, 10)), id="published"),
    pytest.param(Shape(6, 2, 32, (2, 1, 1), bias=True), id="biases"),
    pytest.param(Shape(3, 3, 12, (1, 1, 1)), id="no-groups"),
]


@torch.no_grad()
def logprobs(config: DecoderConfig, weights: dict[str, Tensor], x_TD: Tensor, positions_TA: Tensor) -> Tensor:
    """`[T, vocab]` of whole sequences: one layer of transformers' attention, final norm and head."""
    prefix, eps = "model.layers.0.mixer.", config.norm_eps
    mine = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    [spec] = config.mixers
    assert isinstance(spec, Attention)
    normed = F.rms_norm(x_TD, x_TD.shape[-1:], weights["model.layers.0.norm.weight"], eps)
    x_TD = x_TD + published_attention(spec, mine)(normed, positions_TA)
    last = F.rms_norm(x_TD, x_TD.shape[-1:], weights["model.norm_f.weight"], eps)
    return (last @ weights["lm_head.weight"].T).log_softmax(-1)


@pytest.mark.parametrize("native", ["off", "auto"])
@pytest.mark.parametrize("shape", SHAPES)
def test_probabilities_are_those_of_transformers(shape: Shape, native: str) -> None:
    """For a prompt in chunks with an image between text, and for tokens after it."""
    config = gated_config("*", head_dim=shape.head_dim)
    spec = Attention(
        config.hidden_size, shape.heads, shape.kv_heads, shape.head_dim, shape.bias,
        rope=Rope(2 * sum(shape.section), 1e7, interleaved(shape.section)), gate=True, qk_norm=1e-6,
    )  # fmt: skip
    layer = type(config.layers[0])((("mixer", spec),))
    config = DecoderConfig(config.vocab_size, config.hidden_size, (layer,), position_axes=3)
    weights = dict(random_weights(config))

    rows = torch.randn(12, config.hidden_size, generator=torch.Generator().manual_seed(1))
    prompt = [5, 9, 2, *[0] * 12, 7, 3, 7, 1]
    positions = grid_positions(len(prompt), (3, 3, 4))
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    runner = make_runner(config, weights, native=native, max_chunk=5, page_size=4)
    events = run(runner, request("a", prompt, params, [image(3, rows)], positions=positions))["a"]

    ids = prompt + tokens(events)
    x_TD = weights["model.embeddings.weight"][torch.tensor(ids)].clone()
    x_TD[3:15] = rows
    at = [*positions.prompt, *((len(prompt) + i + positions.delta,) * 3 for i in range(9))]
    expected = logprobs(config, weights, x_TD, torch.tensor(at))
    plain = logprobs(config, weights, x_TD, torch.arange(len(ids))[:, None].expand(-1, 3))
    assert (expected - plain).abs().max() > 0.1, "positions matter"
    for score in events[0].prompt_scores:
        found = expected[score.position - 1]
        assert abs(score.logprob - found[score.token]) < 1e-4
        assert all(abs(logprob - found[token]) < 1e-4 for token, logprob in score.top)
    assert len(events[0].prompt_scores) == len(prompt) - 1 - 12
    for index, event in enumerate(events, start=len(prompt)):
        assert event.logprob is not None and event.token_id == expected[index - 1].argmax()
        assert abs(event.logprob - expected[index - 1][event.token_id]) < 1e-4


def test_axes_are_interleaved_as_published() -> None:
    axes = interleaved((11, 11, 10))
    assert [axis for axis, of in enumerate((11, 11, 10)) if axes.count(axis) != of] == []
    assert axes[:7] == (0, 1, 2, 0, 1, 2, 0) and axes[-3:] == (2, 0, 1)


def test_text_of_counted_positions_needs_none() -> None:
    config = gated_config()
    prompt = list(range(3, 25))
    given = Positions([(index,) * 3 for index in range(len(prompt))], 0)
    found = [
        tokens(run(make_runner(config), request("a", prompt, positions=positions))["a"]) for positions in (None, given)
    ]
    assert found[0] == found[1]


def test_a_norm_without_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match="qk_norm must be above 0, not 0"):
        Attention(32, qk_norm=0.0)
