"""The causal convolution against a loop over its definition."""

from __future__ import annotations

import pytest
import torch
from mamba_inputs import by_definition

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from kernels.slots import SlotRun

CHANNELS = 6


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lengths", [[1], [2, 1, 3], [130, 5], [300], [4, 128, 129]], ids=str)
def test_packed_rows(taps: int, biased: bool, lengths: list[int]) -> None:
    weight, bias = torch.randn(taps, CHANNELS), torch.randn(CHANNELS) if biased else None
    pool = torch.randn(9, taps - 1, CHANNELS)
    before = pool.clone()
    slots, initial = [7, 0, 4][: len(lengths)], [True, False, True][: len(lengths)]
    x = torch.randn(sum(lengths), CHANNELS)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    out = causal_conv1d(x, weight, bias, pool, torch.tensor(slots), torch.tensor(initial), starts)
    for row, part in enumerate(x.split(lengths)):
        window = before[slots[row]] if initial[row] else torch.zeros(taps - 1, CHANNELS)
        expected = by_definition(part, window, weight, bias)
        torch.testing.assert_close(out[starts[row] : starts[row + 1]].double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(pool[slots[row]], torch.cat((window, part))[-(taps - 1) :])
    others = [slot for slot in range(9) if slot not in slots]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("continues", [False, True])
def test_windows_are_saved_on_the_way(continues: bool) -> None:
    """After 1, 2 and 130 tokens of the second row; the rows' own slots get the same final windows."""
    weight, pool = torch.randn(4, CHANNELS), torch.randn(9, 3, CHANNELS)
    before, x = pool.clone(), torch.randn(145, CHANNELS)
    starts = torch.tensor([0, 5, 145])
    given = (torch.tensor([2, 6]), torch.tensor([True, continues]), starts)
    out = causal_conv1d(x, weight, None, pool, *given, saves=[(1, 6, 0), (1, 7, 1), (1, 135, 3)])
    plain = before.clone()
    assert torch.equal(out, causal_conv1d(x, weight, None, plain, *given))
    window = before[6] if continues else torch.zeros(3, CHANNELS)
    for slot, end in ((0, 6), (1, 7), (3, 135)):
        assert torch.equal(pool[slot], torch.cat((window, x[5:end]))[-3:])
    assert torch.equal(pool[[2, 4, 5, 6, 7, 8]], plain[[2, 4, 5, 6, 7, 8]])


def test_update_is_one_token_of_the_packed_form() -> None:
    weight, bias = torch.randn(4, CHANNELS), torch.randn(CHANNELS)
    pool = torch.randn(12, 3, CHANNELS)
    other = pool.clone()
    slots = torch.tensor([3, 4, 5, 6, 7, 0, 9])
    x = torch.randn(7, CHANNELS)
    whole = causal_conv1d(x, weight, bias, other, slots, torch.ones(7, dtype=torch.bool), torch.arange(8))
    found = causal_conv1d_update(x, weight, bias, pool, slots)
    torch.testing.assert_close(found, whole)
    assert torch.equal(pool, other)


@pytest.mark.parametrize("told", [False, True])
def test_padding_reads_and_writes_nothing(told: bool) -> None:
    weight, bias = torch.randn(4, CHANNELS), torch.randn(CHANNELS)
    pool = torch.full((3, 3, CHANNELS), float("nan"))
    pool[1] = 1.0
    slots, x = [-1, 1, -1, -1], torch.randn(4, CHANNELS)
    runs = SlotRun.of(slots) if told else None
    out = causal_conv1d_update(x, weight, bias, pool, torch.tensor(slots), runs)
    assert out.isfinite().all()
    assert pool[[0, 2]].isnan().all() and pool[1].isfinite().all()
    out = causal_conv1d(
        x, weight, bias, pool, torch.tensor([-1, 1]), torch.tensor([True, True]), torch.tensor([0, 2, 4])
    )
    assert out.isfinite().all() and pool[[0, 2]].isnan().all()


def test_state_keeps_its_own_dtype() -> None:
    weight, pool = torch.randn(4, CHANNELS), torch.zeros(1, 3, CHANNELS, dtype=torch.bfloat16)
    x = torch.randn(5, CHANNELS).bfloat16()
    slot, yes = torch.tensor([0]), torch.tensor([True])
    whole = causal_conv1d(x, weight, None, pool.clone(), slot, yes, torch.tensor([0, 5]))
    parts = [causal_conv1d_update(x[i : i + 1], weight, None, pool, slot) for i in range(5)]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert torch.equal(pool[0], x[2:])
