"""Compiled sampling: the reference's tokens, row by row, and its log-probabilities."""

from __future__ import annotations

import ctypes
import itertools
from array import array

import pytest
import torch
from compiled import needs_compiled

from kernels.sample import Masks, RowParams, logprobs, reference
from kernels.sample.compiled import Drawing, DrawRow, SampleParams

pytestmark = needs_compiled
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (64, 1.0, 0.0),
    (5000, 0.9, 0.0),
    (300, 0.5, 0.05),
    (300, 1.0, 0.2),
    (0, 0.7, 0.0),
    (0, 0.999, 0.0),
    (0, 0.999999999, 0.0),
    (0, 1 - 2**-53, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1e-6),
    (40, 0.9, 0.01),
    (0, 0.95, 0.3),
    (99999, 1.0, 0.0),
]
"""top_k, top_p and min_p: none, each alone and together, ones that keep a few and ones that keep thousands."""


def both(
    logits: torch.Tensor, filters: list[tuple[int, float, float]], temperature: float, masks: Masks | None = None
) -> tuple[list[int], list[int]]:
    """The tokens of compiled code and of the reference."""
    rows = logits.shape[0]
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 2**31, (rows,))
    top_k, top_p, min_p = (torch.tensor(column, dtype=torch.float64) for column in zip(*filters, strict=True))
    samples, temperatures = torch.arange(rows) % 3, torch.full((rows,), temperature)
    asked = RowParams(temperatures, top_k.long(), top_p, min_p, seeds, samples, positions, masks)
    params = [
        SampleParams(temperature, p, least, 1.0, 0.0, 0.0, k, sample, seed % 2**64, -1)
        for (k, p, least), sample, seed in zip(filters, samples.tolist(), seeds.tolist(), strict=True)
    ]
    tokens, _ = Drawing(logits.shape[1])(logits, rows_of(params, positions.tolist(), masks))
    return tokens, reference.sample(logits, asked).tolist()


def rows_of(params: list[SampleParams], positions: list[int], masks: Masks | None = None) -> list[DrawRow]:
    index = [-1] * len(params) if masks is None else masks.index_R.tolist()
    words = [0 if masks is None or of < 0 else masks.words_GW[of].data_ptr() for of in index]
    rows = zip(params, positions, words, strict=True)
    return [(ctypes.addressof(one), position, 0, 0, 0, 0, mask) for one, position, mask in rows]


@pytest.mark.parametrize("vocab", [1, 17, 300, 4097, 32000])
@pytest.mark.parametrize("scale", [0.5, 6.0])
def test_draws_are_those_of_the_reference(vocab: int, scale: float) -> None:
    filters = FILTERS * 4
    found, expected = both(torch.randn(len(filters), vocab) * scale, filters, 0.8)
    assert found == expected


@pytest.mark.parametrize("vocab", [300, 4097])
def test_equal_logits_are_ordered_by_id(vocab: int) -> None:
    filters = FILTERS * 8
    found, expected = both(torch.randint(0, 3, (len(filters), vocab)).float(), filters, 1.0)
    assert found == expected


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((len(FILTERS) * 20, 700), float("-inf"))
    logits[:, [10, 300, 699]] = torch.randn(len(logits), 3)
    found, expected = both(logits, FILTERS * 20, 1.0)
    assert found == expected and set(found) == {10, 300, 699}


@pytest.mark.parametrize("vocab", [3, 255, 256, 512, 700, 2000])
def test_the_first_of_the_largest(vocab: int) -> None:
    logits = torch.randint(0, 9, (30, vocab)).float()
    tokens, _ = Drawing(vocab)(logits)
    assert tokens == [row.index(max(row)) for row in logits.tolist()]
    assert Drawing(vocab)(torch.full((1, vocab), float("-inf")))[0] == [0]


@pytest.mark.parametrize("threads", [1, 3, 192])
def test_rows_are_what_they_are_alone(threads: int) -> None:
    logits, filters = torch.randn(len(FILTERS), 4097) * 3, FILTERS
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    together, _ = both(logits, filters, 0.8)
    torch.set_num_threads(1)
    torch.manual_seed(5)
    assert both(logits, filters, 0.8)[0] == together


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_no_distribution_give_some_token(value: float) -> None:
    """A broken model must not crash the server."""
    for place, filters in itertools.product((slice(None), slice(3, 4)), FILTERS):
        logits = torch.randn(1, 700)
        logits[:, place] = value
        params = SampleParams(1.0, filters[1], filters[2], 1.0, 0.0, 0.0, filters[0], 0, 7, 5)
        (token,), _ = Drawing(700)(logits, rows_of([params], [3]), 5)
        assert 0 <= token < 700


@pytest.mark.parametrize("count", [0, 1, 20, 1024, 5000])
def test_reported_log_probabilities_are_the_reference_s(count: int) -> None:
    logits = torch.randn(3, 4097) * 5
    params = [SampleParams(0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 0, count) for _ in range(3)]
    tokens, (chosen, ids, values) = Drawing(4097)(logits, rows_of(params, [3, 4, 5]), count)
    expected = logprobs(logits, torch.tensor(tokens), count)
    torch.testing.assert_close(torch.tensor(chosen), expected[0])
    assert ids == expected[1].tolist()
    torch.testing.assert_close(torch.tensor(values).view(3, -1), expected[2])


def asked_for(**changes: object) -> tuple[SampleParams, list[DrawRow], list[object]]:
    """A row with bias, penalties and mask, with one of its numbers changed; and the objects that it points to."""
    given: dict[str, list[int]] = {"bias_ids": [3], "ends": [5], "tokens": [1, 2]}
    given |= {name: [value] for name, value in changes.items() if name in given}  # type: ignore[list-item]
    kept = {name: array("q", values) for name, values in given.items()}
    bias = array("f", [1.0])
    params = SampleParams(0.0, 1.0, 0.0, 1.1, 0.0, 0.0, 0, 0, 0, -1, 1, 1)
    params.bias_ids, params.ends = (kept[name].buffer_info()[0] for name in ("bias_ids", "ends"))
    params.bias, params.logprobs = bias.buffer_info()[0], changes.get("logprobs", -1)
    known = len(kept["tokens"])
    row = (ctypes.addressof(params), 3, 1, changes.get("prompt", known), known, kept["tokens"].buffer_info()[0], 0)
    return params, [row], [kept, bias]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["bias_ids", "ends", "tokens"])
@pytest.mark.parametrize("token", [-1, 300, -(2**63), 2**63 - 1])
def test_ids_outside_of_the_vocabulary_write_nothing(name: str, token: int) -> None:
    params, rows, kept = asked_for(**{name: token})
    with pytest.raises(IndexError, match="is not in the vocabulary"):
        Drawing(300)(torch.zeros(1, 300), rows)


@pytest.mark.parametrize("name", ["bias_ids", "ends", "tokens"])
@pytest.mark.parametrize("token", [0, 299])
def test_the_first_and_the_last_id_are_in_the_vocabulary(name: str, token: int) -> None:
    params, rows, kept = asked_for(**{name: token})
    assert Drawing(300)(torch.zeros(1, 300), rows)[0] == [token if name == "bias_ids" else 3]


def test_reports_stay_in_their_room() -> None:
    for count, likeliest in ((4, 3), (0, None)):
        params, rows, kept = asked_for(logprobs=count)
        with pytest.raises(IndexError, match="no room for the log-probabilities"):
            Drawing(300)(torch.zeros(1, 300), rows, likeliest)
    params, rows, kept = asked_for(logprobs=1000)
    assert Drawing(300)(torch.zeros(1, 300), rows, 300)[0] == [3]  # as many as there are tokens
    for prompt in (-1, 3):
        params, rows, kept = asked_for(prompt=prompt)
        with pytest.raises(IndexError, match="more prompt tokens than tokens"):
            Drawing(300)(torch.zeros(1, 300), rows)


def masked_rows(rows: int, vocab: int, share: float) -> Masks:
    """Masks of which every third row has none, and the others about `share` of all tokens, at least one."""
    allowed = torch.rand(rows, -(-vocab // 32) * 32) < share
    allowed[torch.arange(rows), torch.randint(0, vocab, (rows,))] = True
    bits = (allowed.view(rows, -1, 32).long() << torch.arange(32)).sum(-1)
    index = torch.arange(rows)
    return Masks(bits.to(torch.int32), torch.where(index % 3 == 0, -1, index))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0], ids=lambda share: f"{share:.0%}")
@pytest.mark.parametrize("vocab", [17, 700, 4097])
def test_masked_draws_are_those_of_the_reference(vocab: int, share: float) -> None:
    """Greedy and drawn; rows without a mask beside rows with one. Bits behind the vocabulary mean nothing."""
    filters = FILTERS * 6
    logits = torch.randn(len(filters), vocab) * 2
    masks = masked_rows(len(filters), vocab, share)
    for temperature in (0.0, 0.8):
        found, expected = both(logits, filters, temperature, masks)
        assert found == expected
        for token, index in zip(found, masks.index_R.tolist(), strict=True):
            assert index < 0 or int(masks.words_GW[index, token // 32]) >> token % 32 & 1
        free, _ = both(logits, filters, temperature)
        if temperature == 0.0:
            assert [found[row] == free[row] for row in range(0, len(found), 3)] == [True] * len(found[::3])


def test_a_mask_that_leaves_only_impossible_tokens_gives_some_token() -> None:
    for filters, temperature in itertools.product(FILTERS, (0.0, 1.0)):
        logits = torch.full((1, 700), float("nan"))
        masks = Masks(torch.tensor([[4, *[0] * 21]], dtype=torch.int32), torch.tensor([0]))
        params = SampleParams(temperature, filters[1], filters[2], 1.0, 0.0, 0.0, filters[0], 0, 7, 5)
        (token,), _ = Drawing(700)(logits, rows_of([params], [3], masks), 5)
        assert 0 <= token < 700


def test_log_probabilities_are_those_without_the_mask() -> None:
    logits = torch.randn(1, 700)
    masks = Masks(torch.tensor([[4, *[0] * 21]], dtype=torch.int32), torch.tensor([0]))
    params = SampleParams(1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, 7, 3)
    (token,), ((chosen,), (ids,), _) = Drawing(700)(logits, rows_of([params], [3], masks), 3)
    expected = logprobs(logits, torch.tensor([2]), 3)
    assert token == 2 and chosen == pytest.approx(expected[0].item(), abs=1e-5) and ids == expected[1][0].tolist()
