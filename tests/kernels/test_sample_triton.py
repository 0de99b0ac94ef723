"""Sampling: the kernel gives the reference's tokens, row by row and number by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from triton_kernels import DEVICE, poisoned

from kernels.dispatch import forced
from kernels.sample import Masks, RowParams, accept_drafts, reference, sample, uniform, uniforms
from kernels.sample import kernel as sample_kernel

# top_k, top_p and min_p of each row: none, each alone, all, wide ones, more than there are.
FILTERS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.05),
    (40, 0.9, 0.01),
    (300, 0.999, 0.0),
    (0, 0.999999999, 0.0),
    (9999, 1.0, 0.0),
]
NONE = FILTERS[0]
ROWS = len(FILTERS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks, tiles and programs for each row, and several values in each bin."""
    for name, size in {"BLOCK": 256, "TILE": 256, "SPAN": 2, "BINS": 16}.items():
        monkeypatch.setattr(sample_kernel, name, size)
    with DEVICE, poisoned():
        yield


def row_params(
    temperature: float | list[float], filters: list[tuple[int, float, float]], masks: Masks | None = None
) -> RowParams:
    top_k, top_p, min_p = (torch.tensor(values, dtype=torch.float64) for values in zip(*filters, strict=True))
    return RowParams(
        temperature_R=torch.tensor(temperature).expand(ROWS).contiguous(),
        top_k_R=top_k.long(),
        top_p_R=top_p,
        min_p_R=min_p,
        seeds_R=torch.randint(-(2**63), 2**63 - 1, (ROWS,), device="cpu").to(DEVICE),
        samples_R=torch.arange(ROWS) % 3,
        positions_R=torch.randint(0, 2**31, (ROWS,)),
        masks=masks,
    )


def both(logits: Tensor, asked: RowParams) -> tuple[Tensor, Tensor]:
    with forced("triton"):
        found = sample(logits, asked)
    return found, reference.sample(logits, asked)


@pytest.mark.parametrize(
    ("entries", "filters"),
    [pytest.param(512, FILTERS, id="listed"), pytest.param(8, [FILTERS[4], *[NONE] * (ROWS - 1)], id="whole-row")],
)
def test_draws_are_those_of_the_reference(
    entries: int, filters: list[tuple[int, float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the values of the deciding bins in a list, and with too many of them for that."""
    monkeypatch.setattr(sample_kernel, "ENTRIES", entries)
    found, expected = both(torch.randn(ROWS, 700) * 3, row_params(0.8, filters))
    assert torch.equal(found, expected)


def one_possible(logits: Tensor) -> Tensor:
    """-inf for all tokens but one of each row."""
    return logits.masked_fill(torch.arange(logits.shape[1]) != torch.arange(5, 5 + ROWS)[:, None], float("-inf"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x / 1000, id="flat"),
        pytest.param(lambda x: x * 1000, id="peaked"),
        pytest.param(lambda x: x - 25 + 25.0 * (torch.arange(x.shape[1]) == 300), id="one-likely"),
        pytest.param(torch.zeros_like, id="equal"),
        pytest.param(lambda x: x.round(), id="few-values"),
        pytest.param(one_possible, id="one-possible"),
        pytest.param(lambda x: x.masked_fill(x < 0.5, float("-inf")), id="some-impossible"),
    ],
)
def test_filters_work_for_any_distribution(change: Callable[[Tensor], Tensor]) -> None:
    """Bins cover the values between the largest and the smallest one, whatever their distance is."""
    filters = [(1, 1.0, 0.0), (699, 0.5, 0.0), (0, 0.9, 0.0), (0, 1.0, 1.0), (100, 0.999, 1e-6), *FILTERS[1:4]]
    found, expected = both(change(torch.randn(ROWS, 700)), row_params(0.9, filters))
    assert torch.equal(found, expected)


def test_greedy_plain_and_filtered_rows_do_not_change_each_other() -> None:
    logits = torch.randn(ROWS, 700)
    asked = row_params([0.0, 0.8] * (ROWS // 2), [NONE, NONE, *FILTERS[1:3]] * (ROWS // 4))
    found, expected = both(logits, asked)
    assert torch.equal(found, expected)
    for row in (0, 1, 3):
        alone = RowParams(*(value[row : row + 1] for value in vars(asked).values() if value is not None))
        with forced("triton"):
            assert torch.equal(sample(logits[row : row + 1], alone), found[row : row + 1])


def test_equal_logits_are_ordered_by_id() -> None:
    logits = torch.randint(0, 3, (ROWS, 300)).float()
    found, expected = both(logits, row_params(1.0, [(0, 0.5, 0.0), (3, 0.5, 0.0), *[NONE] * (ROWS - 2)]))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.randint(-4, 4, (ROWS, 300)).to(dtype)
    found, expected = both(logits, row_params(0.0, FILTERS))
    assert torch.equal(found, expected) and torch.equal(found, logits.float().argmax(-1))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.randn(ROWS, 300)
    logits[:, ::2] = float("-inf")
    for temperature in (0.0, 0.7):
        found, expected = both(logits, row_params(temperature, [NONE] * ROWS))
        assert torch.equal(found, expected) and bool((found % 2 == 1).all())


@pytest.mark.parametrize("entries", [512, 8])
@pytest.mark.parametrize("allowed", [1, 30, 690])
def test_masked_tokens_are_never_drawn(entries: int, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that keep more tokens than there may be drawn; rows without a mask beside others."""
    monkeypatch.setattr(sample_kernel, "ENTRIES", entries)
    kept = torch.rand(ROWS, 704).argsort(-1).argsort(-1) < allowed
    kept[:, -4:] = True  # bits behind the vocabulary
    words = (kept.view(ROWS, -1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)
    index = torch.tensor([6, -1, 0, 7, 5, -1, 3, 1])
    kept[:, -4:] = False
    kept[:, 0] |= kept.sum(-1) == 0
    words[:, 0] |= kept[:, 0].int()
    for temperature in (0.0, 0.8):
        found, expected = both(torch.randn(ROWS, 700) * 3, row_params(temperature, FILTERS, Masks(words, index)))
        assert torch.equal(found, expected)
        for token, mask in zip(found.tolist(), index.tolist(), strict=True):
            assert mask < 0 or kept[mask, token]


def test_random_numbers_are_bit_for_bit_those_of_the_reference() -> None:
    """A row whose cumulative weights are 2^-k apart determines u to the last bit that a draw can show."""
    seeds = [0, 1, 2**63 + 5, 2**64 - 1]
    signed = [seed - (seed >> 63 << 64) for seed in seeds]
    rows = uniforms(torch.tensor(signed), torch.arange(4), torch.tensor([0, 7, 2**31, 2**20]))
    alone = [uniform(s, i, p, 1).item() for i, (s, p) in enumerate(zip(seeds, [0, 7, 2**31, 2**20], strict=True))]
    assert rows.tolist() == alone
    logits = torch.zeros(ROWS, 1 << 12)
    found, expected = both(logits, row_params(1.0, [NONE] * ROWS))
    assert torch.equal(found, expected), "the first 12 bits of each row"


def test_a_vocabulary_that_sums_are_not_exact_for_is_refused() -> None:
    with pytest.raises(ValueError, match="300000 tokens is above the maximum of 262144"):
        sample_kernel.sample(torch.zeros(1, 300000), row_params(1.0, [NONE] * ROWS))


def test_accepted_drafts() -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 1, 7, 8], [5, 6, 7, 8], [0, 0, 0, 0]])
    drafts = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 6, 7], [1, 6, 7], [0, 0, 0]])
    counts = torch.tensor([3, 2, 3, 3, 0])
    with forced("triton"):
        assert accept_drafts(tokens, drafts, counts).tolist() == [3, 2, 1, 0, 0]
    assert reference.accept_drafts(tokens, drafts, counts).tolist() == [3, 2, 1, 0, 0]
