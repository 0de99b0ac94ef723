"""The Mamba-2 recurrence: the update and the chunked scan compared with a loop in float64, and with each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mamba_inputs import NO_LIMIT, Inputs, recurrence
from torch import Tensor

from kernels.chunk_scan import chunk_scan, chunk_table, plan_chunks
from kernels.selective_state_update import discretise, selective_state_update
from kernels.slots import SlotRun


@pytest.mark.parametrize("limit", [NO_LIMIT, (0.5, 1.0)], ids=["free", "limited"])
@pytest.mark.parametrize("shape", [(6, 5, 2, 8), (3, 1, 3, 4), (4, 7, 1, 1)], ids=str)
def test_update(limit: tuple[float, float], shape: tuple[int, int, int, int]) -> None:
    i = Inputs(7, *shape)
    pool = i.pool()
    before, slots = pool.clone(), [2, 3, 4, 5, 6, 8, 0]
    out = selective_state_update(pool, torch.tensor(slots), i.x, i.dt, i.A, i.b, i.c, i.D, i.bias, limit)
    for row, slot in enumerate(slots):
        y, h = recurrence(i, slice(row, row + 1), before[slot], limit)
        torch.testing.assert_close(out[row].double(), y[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pool[slot].double(), h, rtol=1e-4, atol=1e-5)
    assert torch.equal(pool[[1, 7]], before[[1, 7]])


@pytest.mark.parametrize("told", [False, True])
def test_padding_of_an_update(told: bool) -> None:
    i = Inputs(4)
    pool = i.pool(3)
    pool.fill_(float("nan"))
    pool[1] = 1.0
    slots = [-1, -1, 1, -1]
    runs = SlotRun.of(slots) if told else None
    out = selective_state_update(pool, torch.tensor(slots), i.x, i.dt, i.A, i.b, i.c, i.D, i.bias, runs=runs)
    assert out.isfinite().all() and pool[1].isfinite().all() and pool[[0, 2]].isnan().all()


def scan(i: Inputs, pool: Tensor, slots: list[int], starts: list[int], computed: list[int], chunk: int) -> Tensor:
    lengths = [b - a for a, b in zip(starts, starts[1:])]
    dt = discretise(i.dt, i.bias, NO_LIMIT)
    initial = torch.tensor([old > 0 for old in computed])
    chunks = plan_chunks(lengths, computed, chunk)
    return chunk_scan(pool, torch.tensor(slots), initial, i.x, dt, i.A, i.b, i.c, i.D, chunks)


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
@pytest.mark.parametrize("lengths", [[1], [16], [5, 1, 9], [3, 33, 17, 64]], ids=str)
def test_scan(chunk: int, lengths: list[int]) -> None:
    i = Inputs(sum(lengths))
    pool = i.pool()
    before = pool.clone()
    slots, computed = [3, 0, 8, 5][: len(lengths)], [0, 5, 16, 3][: len(lengths)]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    out = scan(i, pool, slots, starts, computed, chunk)
    for row, slot in enumerate(slots):
        part = slice(starts[row], starts[row + 1])
        y, h = recurrence(i, part, before[slot] if computed[row] else torch.zeros_like(before[slot]))
        torch.testing.assert_close(out[part].double(), y, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(pool[slot].double(), h, rtol=1e-3, atol=1e-4)
    others = [slot for slot in range(9) if slot not in slots]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scan_does_not_touch_what_it_does_not_own(dtype: torch.dtype) -> None:
    """Padding has slot -1, which is the last slot if it is used as a Python index; the last row has a slot or is
    padding itself."""
    i = Inputs(12)
    for slots in ([2, -1, -1], [-1, 2, -1], [-1, -1, 2]):
        pool = i.pool(4).to(dtype)
        pool.fill_(float("nan"))
        out = scan(i, pool, slots, [0, 4, 7, 12], [0, 0, 3 * (slots[2] < 0)], 4)
        assert out.isfinite().all() and pool[2].isfinite().all() and pool[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_static_batch_of_a_scan_is_padded(dtype: torch.dtype) -> None:
    """Tables with lines of -1, tokens after the last chunk: those give zeros, and no state is changed."""
    i = Inputs(12)
    chunks = plan_chunks([4, 5], [3, 0], 4, [[5], []])
    pool, table = i.pool(5).to(dtype), torch.full((9, 4), -1, dtype=torch.int64)
    table[: len(chunks)] = torch.tensor(chunk_table(chunks))
    dt = discretise(i.dt, i.bias, NO_LIMIT)
    found = []
    for told, saves in ((chunks, [(1, 3)]), (table, torch.tensor([[1, 3], [-1, -1], [-1, 0]]))):
        slots = pool.clone()
        given = (torch.tensor([2, 1]), torch.tensor([True, False]), i.x, dt, i.A, i.b, i.c, i.D)
        found.append((chunk_scan(slots, *given, told, saves), slots))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    out, slots = found[0]
    assert not out[9:].any() and bool(out[:9].any(-1).all())
    assert torch.equal(slots[[0, 4]], pool[[0, 4]])
    assert bool((slots[[1, 2, 3]] != pool[[1, 2, 3]]).flatten(1).any(-1).all())


@pytest.mark.parametrize("computed", [0, 3])
def test_a_scan_rounds_a_bfloat16_state_after_every_token(computed: int) -> None:
    """Wherever its chunks end, states have the bits of one token after the other. Head counts of real models fill the
    vector registers; a remainder would use other instructions."""
    i = Inputs(9, heads=16, width=16, groups=2, state=16)
    start = i.pool(2).bfloat16()
    stepped, outs = start.clone() if computed else torch.zeros_like(start), []
    for t in range(9):
        row = (i.x[t : t + 1], i.dt[t : t + 1], i.A, i.b[t : t + 1], i.c[t : t + 1], i.D, i.bias)
        outs.append(selective_state_update(stepped, torch.tensor([1]), *row))
    for chunk in (1, 4, 64):
        pool = start.clone()
        out = scan(i, pool, [1], [0, 9], [computed], chunk)
        torch.testing.assert_close(out, torch.cat(outs))
        assert torch.equal(pool[1], stepped[1])


@pytest.mark.parametrize("split", [4, 8, 20])
def test_a_split_at_a_multiple_of_the_chunk_is_bitwise_the_same(split: int) -> None:
    """Head counts of real models fill the vector registers; a remainder would use other instructions."""
    i = Inputs(30, heads=16, width=16, groups=2, state=16)
    whole, parts = i.pool(1), i.pool(1)
    expected = scan(i, whole, [0], [0, 30], [0], 4)
    halves = []
    for begin, end in ((0, split), (split, 30)):
        j = Inputs(end - begin, i.heads, i.width, i.groups, i.state)
        j.x, j.dt, j.b, j.c = (t[begin:end] for t in (i.x, i.dt, i.b, i.c))
        j.A, j.D, j.bias = i.A, i.D, i.bias
        halves.append(scan(j, parts, [0], [0, end - begin], [begin], 4))
    assert torch.equal(torch.cat(halves), expected)
    assert torch.equal(parts, whole)


def test_states_are_saved_at_stops() -> None:
    i = Inputs(11)
    pool = i.pool()
    chunks = plan_chunks([11], [5], 4, [[9, 10]])
    assert [chunk.end for chunk in chunks] == [8, 9, 10, 12, 16]
    before = pool[0].clone()
    dt = discretise(i.dt, i.bias, NO_LIMIT)
    arguments = (torch.tensor([0]), torch.tensor([True]), i.x, dt, i.A, i.b, i.c, i.D)
    chunk_scan(pool, *arguments, chunks, saves=[(1, 3), (2, 4), (2, 6)])
    for end, slot in ((9, 3), (10, 4), (10, 6)):
        torch.testing.assert_close(
            pool[slot].double(), recurrence(i, slice(0, end - 5), before)[1], rtol=1e-3, atol=1e-4
        )


def test_states_of_sixteen_bits_are_rounded_once_a_step() -> None:
    i = Inputs(3)
    pool = i.pool(3).bfloat16()
    before = pool.float()
    selective_state_update(pool, torch.arange(3), i.x, i.dt, i.A, i.b, i.c, i.D, i.bias)
    for row in range(3):
        h = recurrence(i, slice(row, row + 1), before[row])[1]
        torch.testing.assert_close(pool[row].double(), h, rtol=2**-8, atol=1e-5)


def test_many_steps_do_not_drift() -> None:
    """1,024 updates against one scan: relative error of the state below 1e-3."""
    i = Inputs(1024, heads=2, width=3, groups=1, state=4)
    stepped, scanned = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)
    for t in range(1024):
        row = (i.x[t : t + 1], i.dt[t : t + 1], i.A, i.b[t : t + 1], i.c[t : t + 1], i.D, i.bias)
        selective_state_update(stepped, torch.tensor([0]), *row)
    scan(i, scanned, [0], [0, 1024], [0], 64)
    assert (stepped - scanned).norm() < 1e-3 * scanned.norm()


def test_small_steps_do_not_vanish() -> None:
    """softplus as log(1 + exp) would give 0 below -17."""
    assert discretise(torch.tensor([[-30.0]]), torch.zeros(1), NO_LIMIT).item() == pytest.approx(9.3576e-14, rel=1e-4)
    assert discretise(torch.tensor([[50.0]]), torch.zeros(1), NO_LIMIT).item() == 50.0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.lists(st.integers(0, 90), max_size=4)), min_size=1),
    st.sampled_from([1, 4, 16]),
)
def test_chunks_cover_all_tokens_once(rows: list[tuple[int, int, list[int]]], size: int) -> None:
    lengths, computed, stops = zip(*rows, strict=True)
    chunks = plan_chunks(lengths, computed, size, stops)
    assert [token for chunk in chunks for token in range(chunk.first, chunk.last)] == list(range(sum(lengths)))
    assert [chunk.row for chunk in chunks if chunk.opens] == list(range(len(rows)))
    for row, (length, old, wanted) in enumerate(rows):
        ends = {chunk.end for chunk in chunks if chunk.row == row}
        inside = range(old + 1, old + length)
        assert ends == {old + length} | {p for p in inside if p % size == 0 or p in wanted}


@given(st.lists(st.integers(-1, 12), max_size=20), st.integers(1, 5))
def test_slot_runs_say_the_same_as_slots(slots: list[int], limit: int) -> None:
    runs = SlotRun.of(slots, limit)
    told = [run.slot + row - run.begin if run.slot >= 0 else -1 for run in runs for row in range(run.begin, run.end)]
    assert told == slots
    assert all(run.end - run.begin <= limit for run in runs)
