"""The gated delta rule's references against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from delta_inputs import Inputs
from torch import Tensor

from kernels.chunk_scan import chunk_table, plan_chunks
from kernels.gated_delta import delta_gates, gated_delta_scan, gated_delta_tokens, gated_delta_update
from kernels.gated_norm import gated_norm
from kernels.slots import SlotRun


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 8, 6), (3, 3, 1, 4), (1, 3, 5, 1)], ids=str)
def test_update(shape: tuple[int, int, int, int], told: bool) -> None:
    i = Inputs(6, *shape)
    pool = i.pool()
    before, slots = pool.clone(), [2, 3, 4, -1, 8, 0]
    runs = SlotRun.of(slots) if told else None
    out = gated_delta_update(pool, torch.tensor(slots), i.q, i.k, i.v, i.b, i.a, i.A, i.bias, runs)
    for row, slot in enumerate(slots):
        start = before[slot] if slot >= 0 else torch.zeros_like(before[0])
        y, state = i.recurrence(slice(row, row + 1), start)
        close(out[row], y[0])
        if slot >= 0:
            close(pool[slot], state)
    assert torch.equal(pool[[1, 5, 6, 7]], before[[1, 5, 6, 7]])


@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
@pytest.mark.parametrize("lengths", [[1], [16], [5, 1, 9], [3, 33, 17, 64]], ids=str)
def test_scan(chunk: int, lengths: list[int]) -> None:
    i = Inputs(sum(lengths))
    pool = i.pool()
    before, slots, computed = pool.clone(), [3, 0, 8, 5][: len(lengths)], [0, 5, 16, 3][: len(lengths)]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    out = i.scan(pool, slots, lengths, computed, chunk)
    for row, slot in enumerate(slots):
        part = slice(starts[row], starts[row + 1])
        y, state = i.recurrence(part, before[slot] if computed[row] else torch.zeros_like(before[slot]))
        close(out[part], y)
        close(pool[slot], state)
    others = [slot for slot in range(9) if slot not in slots]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("computed", [0, 3])
def test_states_in_bfloat16_are_rounded_after_every_token(computed: int) -> None:
    """A scan, wherever its chunks end, and several tokens give the bits of one token after the other."""
    i = Inputs(9)
    start = i.pool(9).bfloat16()
    stepped, outs, kept = start.clone() if computed else torch.zeros_like(start), [], []
    for t in range(9):
        row = (x[t : t + 1] for x in (i.q, i.k, i.v, i.b, i.a))
        outs.append(gated_delta_update(stepped, torch.tensor([1]), *row, i.A, i.bias))
        kept.append(stepped[1].clone())
    for chunk in (1, 4, 64):
        pool = start.clone()
        torch.testing.assert_close(i.scan(pool, [1], [9], [computed], chunk), torch.cat(outs))
        assert torch.equal(pool[1], stepped[1])
    pool = start if computed else torch.zeros_like(start)
    rows = (x[None] for x in (i.q, i.k, i.v, i.b, i.a))
    slots = torch.tensor([[1, 0, *range(2, 9)]])
    out = gated_delta_tokens(pool, slots, torch.tensor([1]), torch.tensor([9]), *rows, i.A, i.bias)
    torch.testing.assert_close(out[0], torch.cat(outs))
    assert torch.equal(pool[slots[0]], torch.stack(kept))


def test_betas_up_to_two() -> None:
    """Tokens one by one, together and as a prompt; the state's transition then has negative eigenvalues."""
    i = Inputs(9)
    i.beta_scale = 2.0
    pool = i.pool(9)
    y, state = i.recurrence(slice(0, 9), pool[1])
    scanned, stepped, several = pool.clone(), pool.clone(), pool.clone()
    close(i.scan(scanned, [1], [9], [4], 4), y)
    close(scanned[1], state)
    for t in range(9):
        row = (x[t : t + 1] for x in (i.q, i.k, i.v, i.b, i.a))
        close(gated_delta_update(stepped, torch.tensor([1]), *row, i.A, i.bias, beta_scale=2.0)[0], y[t])
    rows = (x[None] for x in (i.q, i.k, i.v, i.b, i.a))
    slots = torch.tensor([[1, 0, *range(2, 9)]])
    close(gated_delta_tokens(several, slots, torch.tensor([1]), torch.tensor([9]), *rows, i.A, i.bias, 2.0)[0], y)
    close(several[8], state)


@pytest.mark.parametrize("bias", [-60.0, 0.0, 60.0])
def test_a_scan_with_equal_keys_and_extreme_gates(bias: float) -> None:
    """Decays of 1 and of nearly 0, changes that cancel each other: no overflow, no loss."""
    i = Inputs(64)
    i.k[:], i.bias[:], i.b[:] = i.k[:1], bias, 30.0
    pool = i.pool()
    y, state = i.recurrence(slice(0, 64), pool[2])
    close(i.scan(pool, [2], [64], [1], 64), y)
    close(pool[2], state)


def test_a_static_batch_of_a_scan_is_padded() -> None:
    """Tables with lines of -1, tokens after the last chunk: those give zeros, and no state is changed."""
    i = Inputs(12)
    chunks = plan_chunks([4, 5], [3, 0], 4, [[5], []])
    pool, table = i.pool(5), torch.full((9, 4), -1, dtype=torch.int64)
    table[: len(chunks)] = torch.tensor(chunk_table(chunks))
    gates = delta_gates(i.b, i.a, i.A, i.bias)
    found = []
    for told, saves in ((chunks, [(1, 3)]), (table, torch.tensor([[1, 3], [-1, -1], [-1, 0]]))):
        slots = pool.clone()
        given = (torch.tensor([2, 1]), torch.tensor([True, False]), i.q, i.k, i.v, *gates)
        found.append((gated_delta_scan(slots, *given, told, saves), slots))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    out, slots = found[0]
    assert not out[9:].any() and bool(out[:9].any(-1).all())
    assert torch.equal(slots[[0, 4]], pool[[0, 4]])
    assert bool((slots[[1, 2, 3]] != pool[[1, 2, 3]]).flatten(1).any(-1).all())


@pytest.mark.parametrize("kind", ["update", "scan", "tokens"])
def test_slots_of_nobody_may_hold_anything(kind: str) -> None:
    i = Inputs(4)
    pool = i.pool(3)
    pool.fill_(float("nan"))
    pool[1] = 1.0
    if kind == "update":
        slots = torch.tensor([-1, -1, 1, -1])
        out = gated_delta_update(pool, slots, i.q, i.k, i.v, i.b, i.a, i.A, i.bias)
    elif kind == "scan":
        out = i.scan(pool, [-1, 1, -1], [1, 1, 2], [0, 3, 5], 4)
    else:
        slots = torch.tensor([[-1, -1], [1, 1]])
        rows = (x.unflatten(0, (2, 2)) for x in (i.q, i.k, i.v, i.b, i.a))
        given = (slots, torch.tensor([1, 1]), torch.tensor([0, 1]))
        out = gated_delta_tokens(pool, *given, *rows, i.A, i.bias)
    assert out.isfinite().all() and pool[1].isfinite().all() and pool[[0, 2]].isnan().all()


@pytest.mark.parametrize("rows", [3, 600])
def test_the_norm_comes_before_the_gate(rows: int) -> None:
    i = Inputs(rows, 4, 4, 8, 8)
    y, gate, weight = i.v.flatten(1), i.q.flatten(1), i.randn(32)
    grouped = y.double().unflatten(1, (4, 8))
    normed = (grouped / (grouped.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1) * weight
    expected = normed * gate.double() / (1 + (-gate.double()).exp())
    close(gated_norm(y, gate, weight, 8, 1e-6, norm_first=True), expected)
