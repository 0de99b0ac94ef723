"""The counter-based generator gives the published numbers, and draws follow their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.sample import draw, draw_filtered, greedy, logprobs, philox4x32, uniform

ONES = 0xFFFFFFFF
KNOWN = [
    # Known answers that Random123 (Salmon et al.) ships for philox4x32 with 10 rounds.
    pytest.param([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], id="zeros"),
    pytest.param([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD], id="ones"),
    pytest.param(
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        id="pi",
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == expected
    batch = philox4x32(torch.tensor([counter, [1, 2, 3, 4]]), torch.tensor([key, [5, 6]]))
    assert batch[0].tolist() == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 100), st.integers(0, 10**6))
def test_uniform_depends_on_its_counter_only(seed: int, sample: int, position: int) -> None:
    ahead = uniform(seed, sample, position, 5)
    assert torch.equal(ahead[3:], uniform(seed, sample, position + 3, 2))
    assert ((ahead > 0) & (ahead < 1)).all()
    assert not torch.equal(ahead, uniform(seed, sample + 1, position, 5))
    assert not torch.equal(ahead, uniform(seed ^ (1 << 63), sample, position, 5))


def test_uniform_is_uniform() -> None:
    counts = torch.histc(uniform(5, 0, 0, 20000), 20, 0.0, 1.0)
    assert ((counts - 1000).square() / 1000).sum() < 50


@pytest.mark.parametrize("vocab", [3, 255, 256, 512, 700, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_is_the_first_of_the_largest(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randint(0, 9, (30, vocab)).to(dtype)
    assert greedy(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert greedy(torch.full((1, vocab), float("-inf"), dtype=dtype)).tolist() == [0]


@pytest.mark.parametrize("vocab", [1, 5, 256, 700])
def test_draw_inverts_the_cumulative_distribution(vocab: int) -> None:
    logits = torch.randn(1, vocab) * 3
    bounds = torch.softmax(logits[0].double(), -1).cumsum(0)
    targets = torch.linspace(0.001, 0.999, 200, dtype=torch.float64)
    found = draw(logits.expand(200, vocab), targets)
    clear = (targets[:, None] - bounds).abs().amin(1) > 1e-6
    expected = torch.searchsorted(bounds, targets, right=True).clamp(max=vocab - 1)
    assert torch.equal(found[clear], expected[clear]) and clear.sum() > 150


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((3, 600), float("-inf"))
    logits[:, [10, 300]] = 0.0
    edges = torch.tensor([1e-16, 0.5, 1 - 1e-16], dtype=torch.float64)
    assert set(draw(logits, edges).tolist()) <= {10, 300}
    assert draw(logits, edges)[0] == 10 and draw(logits, edges)[2] == 300
    off = torch.zeros(3, dtype=torch.int64), torch.full((3,), 0.99, dtype=torch.float64), torch.zeros(3)
    assert set(draw_filtered(logits, edges, *off).tolist()) <= {10, 300}


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1024, 1025, 3000])
@pytest.mark.parametrize("top_p", [0.999999999, 1 - 2**-53])
def test_a_top_p_that_rounding_makes_unreachable_keeps_everything(vocab: int, top_p: float) -> None:
    """The candidates' sums are float64 and the row's total is of float32 weights: the share may never be reached."""
    logits, uniforms = torch.randn(40, vocab) * 0.3, torch.linspace(1e-3, 1 - 1e-3, 40, dtype=torch.float64)
    off = torch.zeros(40, dtype=torch.int64), torch.full((40,), top_p, dtype=torch.float64), torch.zeros(40)
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    bounds = torch.softmax(order.values.double(), -1).cumsum(-1)
    found = draw_filtered(logits, uniforms, *off)
    expected = torch.searchsorted(bounds, uniforms[:, None], right=True).clamp(max=vocab - 1)
    clear = (bounds - uniforms[:, None]).abs().amin(-1) > 1e-6
    assert torch.equal(found[clear], order.indices.gather(1, expected)[clear, 0]) and int(clear.sum()) > 30


@pytest.mark.parametrize("vocab", [65, 1500])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_no_distribution_end_with_some_token(vocab: int, value: float) -> None:
    logits = torch.full((4, vocab), value)
    logits[2:, 3:] = 0.0
    filters = (
        torch.tensor([0, 70, 0, 70]),
        torch.tensor([0.9, 0.9, 1.0, 0.999999999]),
        torch.tensor([0.0, 0.0, 0.1, 0.0]),
    )
    found = draw_filtered(
        logits, torch.full((4,), 0.7, dtype=torch.float64), filters[0], *(f.double() for f in filters[1:])
    )
    assert all(0 <= token < vocab for token in found.tolist())


def test_ties_are_ordered_by_id() -> None:
    """500 equal logits: top-k 3 keeps ids 0, 1 and 2, wherever the selection algorithm finds them."""
    logits, edges = torch.zeros(3, 500), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    none = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    assert draw_filtered(logits, edges, torch.full((3,), 3), *none).tolist() == [0, 1, 2]
    top_p = torch.full((3,), 0.006, dtype=torch.float64)
    assert draw_filtered(logits, edges, torch.zeros(3, dtype=torch.int64), top_p, none[1]).tolist() == [0, 1, 2]


def test_log_probabilities_do_not_depend_on_the_number_of_rows() -> None:
    logits, tokens = torch.randn(35, 3000) * 5, torch.arange(35)
    chosen, ids, values = logprobs(logits, tokens, 4)
    norm = torch.logsumexp(logits, -1)
    assert torch.equal(chosen, logits[torch.arange(35), tokens] - norm)
    assert torch.equal(values, logits.gather(1, ids) - norm[:, None])


@pytest.mark.parametrize("vocab", [3, 500, 5000])
@pytest.mark.parametrize("count", [1, 2, 20, 499, 5000])
def test_reported_ties_are_ordered_by_id(vocab: int, count: int) -> None:
    """The greedy token, which is the first of the largest, is also the first of the likeliest that are reported."""
    logits = torch.cat((torch.zeros(1, vocab), torch.randint(0, 4, (5, vocab)).float(), torch.randn(2, vocab)))
    tokens = greedy(logits)
    _, ids, values = logprobs(logits, tokens, count)
    expected = torch.sort(torch.log_softmax(logits, -1), dim=-1, descending=True, stable=True)
    assert torch.equal(ids, torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :count])
    assert torch.equal(ids[:, 0], tokens)
    torch.testing.assert_close(values, expected.values[:, :count])
