"""Sampling: the effects of filters and penalties, and independence of other rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import lines_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoder.constraints import Constraint
from decoder.request import DecoderRequest
from decoder.sampler import Sampler
from decoder.sampling import Choice, SamplingParams
from decoder.sequence import Sequence
from decoder.token_constraints import AllowedTokens
from kernels.sample import uniform

VOCAB = 300


@pytest.fixture(params=[True, False], ids=["compiled", "operations"])
def make(request: pytest.FixtureRequest) -> Callable[..., Sampler]:
    """Samplers with and without compiled code."""
    return functools.partial(Sampler, compiled=request.param)


def sequence(batch_slot: int, params: SamplingParams, prompt: list[int], output: list[int], **rest: Any) -> Sequence:
    made = Sequence(DecoderRequest(str(batch_slot), prompt, params, output_ids=output, **rest), batch_slot, 100)
    made.held.batch_slot, made.held.admission = batch_slot, batch_slot
    made.start()
    return made


def naive(logits: Tensor, of: Sequence) -> int:
    """One row, one token at a time, in Python and float64."""
    params, row = of.request.sampling, logits.double().tolist()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    output = of.tokens[of.prompt_len :]
    for token in set(of.tokens):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    constraint = of.request.constraint
    if len(output) < params.min_tokens and constraint is None:
        for token in of.request.eos_token_ids | params.stop_token_ids:
            row[token] = -math.inf
    if isinstance(constraint, AllowedTokens):
        kept = constraint.allowed - (of.request.eos_token_ids | params.stop_token_ids)
        allowed = kept if len(output) < params.min_tokens and kept else constraint.allowed
        row = [value if token in allowed else -math.inf for token, value in enumerate(row)]
    if params.greedy:
        return row.index(max(row))
    largest = max(row)
    weights = [math.exp((value - largest) / params.temperature) for value in row]
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    if params.top_k:
        order = order[: params.top_k]
    mass, sum_kept, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if sum_kept >= params.top_p * mass:
            break
        if weights[token] >= params.min_p:
            kept.append(token)
            sum_kept += weights[token]
    if not filtered:
        kept = list(range(len(row)))
    target = uniform(params.seed, of.request.sample_index, len(of.tokens), 1).item() * sum(weights[t] for t in kept)
    for token in kept:
        target -= weights[token]
        if target < 0:
            return token
    return kept[-1]


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    min_tokens=st.sampled_from([0, 5]),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 7, 100, 299, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    logit_bias=st.sampled_from([{}, {3: 5.0, 7: -100.0}]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({11})]),
    logprobs=st.sampled_from([None, 0, 3]),
)


CONSTRAINTS = [None, *(AllowedTokens(of) for of in ([11], [2, 11], [2, 3, 7, 290], range(0, 300, 2), range(300)))]


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(PARAMS, st.sampled_from(CONSTRAINTS)), min_size=1, max_size=5),
    st.sampled_from([0.3, 3.0]),
    st.integers(0, 1000),
)
def test_a_batch_draws_what_each_row_draws(
    make: Callable[..., Sampler], asked: list[tuple[SamplingParams, Constraint | None]], scale: float, seed: int
) -> None:
    """With and without constraints. The reported log-probabilities of a token are those of the unconstrained
    distribution."""
    params = [item for item, _ in asked]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), VOCAB, generator=generator) * scale
    rows = [
        sequence(
            batch_slot,
            item,
            [1, 2, 3, batch_slot],
            [5, 5, batch_slot][: seed % 4],
            eos_token_ids=frozenset({2}),
            sample_index=batch_slot,
            constraint=constraint,
        )
        for batch_slot, (item, constraint) in enumerate(asked)
    ]
    choices = make(VOCAB, 8).sample(logits, rows)
    for row, choice in zip(rows, choices, strict=True):
        assert make(VOCAB, 8).sample(logits[row.held.batch_slot : row.held.batch_slot + 1], [row]) == [choice]
        assert choice.token == naive(logits[row.held.batch_slot], row)
        if choice.logprob is not None:
            expected = logits[row.held.batch_slot].log_softmax(-1)[choice.token].item()
            assert choice.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("minimum", [0, 3, 4, 5])
def test_tokens_ahead_count_as_if_they_were_drawn(make: Callable[..., Sampler], minimum: int) -> None:
    """One of them twice; with them the answer has four tokens, so the fifth may or may not be an end token."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.2, min_tokens=minimum)
    logits = torch.linspace(3.0, 2.4, VOCAB)[None]
    rest = {"eos_token_ids": frozenset({8})}
    for ahead in ([5, 5, 0], [0, 1, 2], [1, 0, 1]):
        drawn = make(VOCAB, 1).sample(logits, [sequence(0, params, [7], [3], **rest)], [ahead])
        assert drawn[0].token == naive(logits[0], sequence(0, params, [7], [3, *ahead], **rest))
        bumped = logits.clone()
        bumped[0, 8] = 9.0
        drawn = make(VOCAB, 1).sample(bumped, [sequence(0, params, [7], [3], **rest)], [ahead])
        assert (drawn[0].token == 8) == (minimum <= 4)
    close = logits.clone()
    close[0, 5] = 3.9  # the largest logit after it has been drawn once, but not after twice
    for ahead, expected in (([5, 9, 10], 5), ([5, 5, 10], 0)):
        assert make(VOCAB, 1).sample(close, [sequence(0, params, [7], [3], **rest)], [ahead])[0].token == expected


EXTREME = [
    {"temperature": 1e-5},
    {"temperature": 1e6},
    {"temperature": 1e-39, "top_k": 5},
    {"repetition_penalty": 1e-3, "temperature": 1e-5},
    {"repetition_penalty": 1e3, "top_p": 0.9},
    {"frequency_penalty": 1e10, "temperature": 1e-5},
    {"frequency_penalty": -1e10, "presence_penalty": 1e10},
    {"logit_bias": {5: 1e10, 6: 1e10}, "temperature": 1e-5},
    {"logit_bias": {5: 1e10, 6: 1e10}, "min_p": 1e-300},
    {"logit_bias": {5: -1e10, 299: -1e10}, "top_k": 299},
    {"top_p": 1e-300},
    {"top_p": 1 - 2**-53},
    {"top_k": 2**31 - 1, "temperature": 1e6},
]
"""The limits of the allowed values."""


@pytest.mark.parametrize("params", EXTREME, ids=lambda params: "-".join(map(str, params.values())))
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_all_back_ends_draw_the_same_at_the_bounds(params: dict[str, Any], scale: float) -> None:
    """For ten seeds each, in torch, in compiled code and in float64."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * scale
    for seed in range(10):
        row = sequence(0, SamplingParams(**params, seed=seed), [1, 2, 3], [5, 5, 9])
        drawn = [Sampler(VOCAB, 1, compiled=compiled).sample(logits, [row])[0].token for compiled in (True, False)]
        assert drawn[0] == drawn[1]
        if "frequency_penalty" not in params and "logit_bias" not in params:  # both round in float32
            assert drawn[0] == naive(logits[0], row)


def test_penalties_follow_the_tokens(make: Callable[..., Sampler]) -> None:
    """The buffers of a batch slot follow its sequence, and are reset for a new one."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.1)
    sampler, logits = make(VOCAB, 2), torch.linspace(3.0, -3.0, VOCAB)[None]
    for admission in range(2):
        row = sequence(0, params, [9, 9], [])
        row.held.admission = admission
        for _ in range(12):
            token = sampler.sample(logits, [row])[0].token
            assert token == naive(logits[0], row)
            row.tokens.append(token)


def test_reported_logprobs_are_of_the_raw_distribution(make: Callable[..., Sampler]) -> None:
    logits = torch.randn(1, VOCAB)
    params = SamplingParams(temperature=0.2, top_k=3, logit_bias={250: 50.0}, logprobs=4)
    choice = make(VOCAB, 1).sample(logits, [sequence(0, params, [1], [])])[0]
    raw = torch.log_softmax(logits[0].double(), -1)
    assert choice.token == 250
    assert choice.logprob == pytest.approx(raw[250].item(), abs=1e-5)
    values, ids = raw.topk(4)
    assert [token for token, _ in choice.top] == ids.tolist()
    assert [value for _, value in choice.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_greedy_takes_the_lowest_of_equals(make: Callable[..., Sampler]) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [40, 200]] = 1.0
    rows = [sequence(batch_slot, SamplingParams(temperature=0.0), [1], []) for batch_slot in (0, 1)]
    assert make(VOCAB, 2).sample(logits, rows) == [Choice(0), Choice(40)]


def test_frequencies_follow_probabilities(make: Callable[..., Sampler]) -> None:
    """4,000 draws of one distribution, of 40 seeds: within 5 standard deviations of the softmax."""
    logits, width = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 40
    count, found = 4000, [0] * 4
    sampler = make(4, width)
    rows = [sequence(slot, SamplingParams(seed=11 + slot), [1], []) for slot in range(width)]
    for position in range(count // width):
        for row in rows:
            row.tokens = [1] * (position + 1)
        for choice in sampler.sample(logits.expand(width, -1).contiguous(), rows):
            found[choice.token] += 1
    for hits, p in zip(found, torch.softmax(logits[0], -1).tolist(), strict=True):
        assert abs(hits - count * p) < 5 * math.sqrt(count * p * (1 - p))


def test_samples_of_one_prompt_read_its_biases_once(make: Callable[..., Sampler]) -> None:
    """There may be a bias for each id of the vocabulary, and 64 samples that start in one step."""

    def cost(biases: int) -> int:
        params, sampler = SamplingParams(logit_bias=dict.fromkeys(range(biases), 0.5)), make(VOCAB, 2)
        first, second = (sequence(index, params, [1, 2], [], sample_index=index) for index in range(2))
        sampler.sample(torch.zeros(1, VOCAB), [first])
        return lines_run(sampler.sample, torch.zeros(1, VOCAB), [second])

    few, many = cost(2), cost(VOCAB)
    assert many == few, f"{few} lines with 2 biases, {many} with {VOCAB}"
