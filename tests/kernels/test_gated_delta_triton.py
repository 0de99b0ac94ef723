"""The gated delta rule in Triton compared with its definition in float64, and with itself bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_inputs import Inputs
from mamba_inputs import by_definition
from torch import Tensor
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.chunk_scan import plan_chunks
from kernels.dispatch import forced
from kernels.gated_delta import (
    DeltaTerms,
    delta_gates,
    gated_delta_advance,
    gated_delta_replay,
    gated_delta_scan,
    gated_delta_tokens,
    gated_delta_update,
)
from kernels.scan_tables import ScanTables

NAN = float("nan")
SHAPES = [(2, 4, 8, 6), (3, 3, 5, 20), (1, 3, 130, 1)]


def places(values: list[Any]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def apart(pool: Tensor) -> Tensor:
    """The same states in non-contiguous slots, as in the arena."""
    wide = pool.new_full((pool.shape[0], pool[0].numel() + 64), NAN)
    wide[:, : pool[0].numel()] = pool.flatten(1)
    return wide[:, : pool[0].numel()].unflatten(1, pool.shape[1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update(shape: tuple[int, int, int, int]) -> None:
    i = Inputs(4, *shape).to(DEVICE)
    i.beta_scale = 2.0
    before, slots = i.pool(6).to(DEVICE), [4, 0, -1, 2]
    pool, plain_pool = apart(before), before.clone()
    pool[[1, 3, 5]] = NAN
    b, a = torch.cat((i.b, i.a), 1).split(i.heads, 1)
    given = (places(slots), i.q, i.k, i.v, b, a, i.A, i.bias)
    with forced("triton"), poisoned():
        out = gated_delta_update(pool, *given, beta_scale=2.0)
    with forced("reference"):
        plain = gated_delta_update(plain_pool, *given, beta_scale=2.0)
    for row, slot in enumerate(slots):
        y, h = i.recurrence(slice(row, row + 1), before[slot] if slot >= 0 else torch.zeros_like(before[0]))
        assert_as_good(out[row], y[0], plain[row])
        if slot >= 0:
            assert_as_good(pool[slot], h, plain_pool[slot], "state")
    assert pool[[1, 3, 5]].isnan().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_several_tokens(shape: tuple[int, int, int, int]) -> None:
    """Bitwise equal to single tokens, with a state after each; none after a row's length."""
    i = Inputs(9, *shape).to(DEVICE)
    before, slots = i.pool(9).to(DEVICE), [[3, 1, 6, 2], [5, 8, 0, -1], [-1, -1, -1, -1]]
    pool, singles = apart(before), apart(before)
    rows = [x.unflatten(0, (3, 3)) for x in (i.q, i.k, i.v, i.b, i.a)]
    where = (places(slots), places([2, 1, 1]), places([3, 2, 0]))
    with forced("triton"), poisoned():
        out = gated_delta_tokens(pool, *where, *rows, i.A, i.bias, 1.5)
    assert out.isfinite().all()
    for row, (read, length) in enumerate([(1, 3), (5, 2)]):
        for token in range(length):
            to = slots[row][token]
            singles[to] = before[read] if token == 0 else singles[slots[row][token - 1]]
            one = [x[row, token][None] for x in rows]
            with forced("triton"):
                y = gated_delta_update(singles, places([to]), *one, i.A, i.bias, None, 1.5)
            assert torch.equal(out[row, token], y[0])
    assert torch.equal(pool, singles)


def test_states_of_sixteen_bits_are_rounded_once() -> None:
    i = Inputs(2).to(DEVICE)
    pool = i.pool(2).to(DEVICE).bfloat16()
    before = pool.float()
    i.q, i.k, i.v = (x.bfloat16() for x in (i.q, i.k, i.v))
    with forced("triton"), poisoned():
        out = gated_delta_update(pool, places([1, 0]), i.q, i.k, i.v, i.b, i.a, i.A, i.bias)
    assert out.dtype == torch.bfloat16
    for row, slot in enumerate((1, 0)):
        y, h = i.recurrence(slice(row, row + 1), before[slot])
        assert_as_good(pool[slot], h, h.bfloat16(), "state")
        assert_as_good(out[row], y[0], y[0].bfloat16())


def test_gates() -> None:
    """Also where softplus is tiny or large."""
    i = Inputs(6, 3, 3).to(DEVICE)
    i.a[0], i.a[1], i.b[0], i.b[1] = -60.0, 60.0, -100.0, 100.0
    b, a = torch.cat((i.b, i.a), 1).split(3, 1)
    with forced("triton"), poisoned():
        log_decay, beta = delta_gates(b, a, i.A, i.bias, 2.0)
    wide = (i.a.double() + i.bias).exp().log1p()
    plain = delta_gates(b, a, i.A, i.bias, 2.0)
    assert_as_good(log_decay, i.A.double() * wide, plain[0])
    assert_as_good(beta, 2.0 * i.b.double().sigmoid(), plain[1])
    assert bool((log_decay[0] < 0).all())


def scanned(
    i: Inputs, pool: Tensor, slots: list[int], lengths: list[int], computed: list[int], chunk: int,
    saves: list[tuple[int, int, int]], choice: str, spare: int = 0,
) -> Tensor:  # fmt: skip
    """`gated_delta_scan` with the arguments of each implementation; `saves`: (row, packed end, slot); `spare` tokens
    and two rows are padding."""
    begins = [sum(lengths[:row]) for row in range(len(lengths))]
    stops = [
        [end - begins[row] + computed[row] for owner, end, _ in saves if owner == row] for row in range(len(slots))
    ]
    chunks = plan_chunks(lengths, computed, chunk, stops)
    state_saves = [(n, slot) for n, c in enumerate(chunks) for row, end, slot in saves if (row, end) == (c.row, c.last)]
    room = ScanTables.room(sum(lengths) + spare, len(slots) + 2, len(saves) + 1, chunk)
    tables = ScanTables.of(lengths, computed, chunk, saves, device=DEVICE, padded=room if spare else None)
    padding = [-1, -1] if spare else []
    given = (places(slots + padding), torch.tensor([old > 0 for old in computed + padding], device=DEVICE))
    with forced(choice):  # type: ignore[arg-type]
        gates = delta_gates(i.b, i.a, i.A, i.bias)
        return gated_delta_scan(pool, *given, i.q, i.k, i.v, *gates, chunks, state_saves, tables)


@pytest.mark.parametrize(
    ("shape", "lengths", "computed", "chunk"),
    [
        pytest.param((2, 4, 8, 6), [5, 0, 9], [3, 7, 0], 4, id="odd-4"),
        pytest.param((1, 2, 17, 20), [33, 1], [16, 31], 16, id="odd-16"),
        pytest.param((1, 2, 16, 40), [45, 60], [0, 33], 32, id="two-blocks-32"),
        pytest.param((1, 1, 16, 16), [135], [0], 64, id="four-blocks-64"),
        pytest.param((1, 1, 16, 16), [135], [0], 128, id="eight-blocks-128"),
    ],
)
def test_scan(shape: tuple[int, int, int, int], lengths: list[int], computed: list[int], chunk: int) -> None:
    i = Inputs(sum(lengths) + 3, *shape).to(DEVICE)
    i.q[-3:] = i.k[-3:] = i.v[-3:] = NAN  # tokens that pad a graph's buffers
    before, slots, end = i.pool().to(DEVICE), [3, 0, 8][: len(lengths)], sum(lengths)
    saves = {4: [(2, end - 1, 5), (0, 2, 2), (0, 2, 6)], 16: [(0, 33, 2)], 32: [(1, 64, 5)]}.get(chunk, [(0, 67, 5)])
    pool = apart(before)
    pool[[slot for slot in range(9) if slot not in slots]] = NAN
    pool[[slot for slot, old in zip(slots, computed) if not old]] = NAN
    plain_pool = pool.clone()
    with poisoned():
        out = scanned(i, pool, slots, lengths, computed, chunk, saves, "triton", spare=3)
    plain = scanned(i, plain_pool, slots, lengths, computed, chunk, saves, "reference")
    assert out[end:].eq(0).all() and out.shape == i.v.shape
    for row, slot in enumerate(slots):
        part = slice(sum(lengths[:row]), sum(lengths[: row + 1]))
        if not lengths[row]:
            assert torch.equal(pool[slot], before[slot])
            continue
        initial = before[slot] if computed[row] else torch.zeros_like(before[slot])
        y, h = i.recurrence(part, initial)
        assert_as_good(out[part], y, plain[part])
        assert_as_good(pool[slot], h, plain_pool[slot], "state")
        for _, stop, target in [save for save in saves if save[0] == row]:
            kept = i.recurrence(slice(part.start, stop), initial)[1]
            assert_as_good(pool[target], kept, plain_pool[target], "kept state")
    untouched = [slot for slot in range(9) if slot not in {*slots, *(slot for _, _, slot in saves)}]
    assert pool[untouched].isnan().all()


@pytest.mark.parametrize("bias", [-60.0, 0.0, 60.0])
def test_a_scan_with_equal_keys_and_extreme_gates(bias: float) -> None:
    """Decays of 1 and of nearly 0, changes that cancel each other: no overflow, no loss."""
    i = Inputs(64, 1, 2).to(DEVICE)
    i.k[:], i.bias[:], i.b[:] = i.k[:1], bias, 30.0
    pool = i.pool(1).to(DEVICE)
    y, h = i.recurrence(slice(0, 64), pool[0])
    with poisoned():
        out = scanned(i, pool, [0], [64], [1], 64, [], "triton")
    torch.testing.assert_close(out.double(), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool[0].double(), h, rtol=1e-4, atol=1e-5)


def test_a_scan_in_bfloat16_is_as_good_as_torch() -> None:
    i = Inputs(80, 2, 4, 16, 16).to(DEVICE)
    i.q, i.k, i.v = (x.bfloat16() for x in (i.q, i.k, i.v))
    pool = i.pool(1).to(DEVICE)
    state = pool[0].clone()
    y, h = i.recurrence(slice(0, 80), state)
    with poisoned():
        out = scanned(i, pool, [0], [80], [8], 64, [], "triton")
    # One token after another, in bfloat16 but for the state.
    log_decay, beta = delta_gates(i.b, i.a, i.A, i.bias)
    q, k = ((x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt()).bfloat16() for x in (i.q, i.k))
    q, k = (x.repeat_interleave(2, 1)[:, :, None] for x in (q * 0.25, k))
    plain = []
    for t in range(80):
        state = state * log_decay[t].exp()[:, None, None]
        change = beta[t, :, None, None].bfloat16() * (i.v[t][:, None] - k[t] @ state.bfloat16())
        state = state + k[t].transpose(1, 2).float() @ change.float()
        plain.append((q[t] @ state.bfloat16())[:, 0])
    assert out.dtype == torch.bfloat16
    assert_as_good(out, y, torch.stack(plain))
    assert_as_good(pool[0], h, state, "state")


@pytest.mark.parametrize("split", [4, 20])
def test_a_scan_split_at_a_chunk_is_bitwise_the_same(split: int) -> None:
    i = Inputs(30, 1, 2).to(DEVICE)
    whole = i.pool(1).to(DEVICE)
    parts = whole.clone()
    expected = scanned(i, whole, [0], [30], [0], 4, [], "triton")
    halves = []
    for begin, end in ((0, split), (split, 30)):
        j = Inputs(1, 1, 2)
        j.q, j.k, j.v, j.a, j.b = (x[begin:end] for x in (i.q, i.k, i.v, i.a, i.b))
        j.A, j.bias = i.A, i.bias
        halves.append(scanned(j, parts, [0], [end - begin], [begin], 4, [], "triton"))
    assert torch.equal(torch.cat(halves), expected) and torch.equal(parts, whole)


def test_a_scan_without_tables_or_of_long_chunks_is_refused() -> None:
    i = Inputs(3)
    gates = delta_gates(i.b, i.a, i.A, i.bias)
    given = (i.pool(), torch.tensor([0]), torch.tensor([False]), i.q, i.k, i.v, *gates, plan_chunks([3], [0], 4))
    with forced("triton"), pytest.raises(ValueError, match="needs tables"):
        gated_delta_scan(*given)
    with forced("triton"), pytest.raises(ValueError, match="chunk_size 256 is above the maximum of 128"):
        gated_delta_scan(*given, (), ScanTables.of([3], [0], 256))


class Replay:
    """A layer with 2 keys of 8 for 4 heads of 6, and rings of 8 steps; rows: two, and one of padding."""

    def __init__(self) -> None:
        self.i = Inputs(8).to(DEVICE)
        channels = 2 * 2 * 8 + 4 * 6
        self.terms = DeltaTerms(torch.randn(4, channels, device=DEVICE), self.i.A, self.i.bias, 2, 8, 2.0)
        self.states, self.windows = apart(self.i.pool(5).to(DEVICE)), torch.randn(5, 3, channels, device=DEVICE)
        self.rings = torch.full((4, 8, channels + 8), NAN, device=DEVICE)
        self.counts = [3, 0, 0]
        self.rings[2, :3] = torch.randn(3, channels + 8, device=DEVICE)
        self.states[[0, 2, 4]], self.windows[[0, 2, 4]] = NAN, NAN
        self.batch_slots, self.slots = places([2, 0, -1]), places([3, 1, -1])

    def exact(self, ring: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """(outputs, state after them) of a ring's steps, starting from a slot, float64."""
        conv_in, b, a = ring.split([ring.shape[1] - 8, 4, 4], dim=1)
        i = Inputs(1)
        i.A, i.bias, i.b, i.a, i.beta_scale = self.i.A, self.i.bias, b, a, 2.0
        i.q, i.k, i.v = self.terms.split(by_definition(conv_in, self.windows[slot], self.terms.conv_WC, None))
        return i.recurrence(slice(0, ring.shape[0]), self.states[slot])


def test_replayed_tokens() -> None:
    made = Replay()
    inputs = torch.randn(3, 2, made.rings.shape[2], device=DEVICE)
    lengths, plain_rings = places([2, 1, 0]), made.rings.clone()
    tail = (made.batch_slots, made.slots, places(made.counts), lengths, inputs, made.terms, 5)
    before = made.states.clone()
    with forced("triton"), poisoned():
        out = gated_delta_replay(made.states, made.windows, made.rings, *tail)
    with forced("reference"):
        plain = gated_delta_replay(made.states, made.windows, plain_rings, *tail)
    assert torch.equal(made.rings.nan_to_num(7.0), plain_rings.nan_to_num(7.0)) and out.isfinite().all()
    assert torch.equal(made.states.nan_to_num(7.0), before.nan_to_num(7.0))
    for row, (owner, slot, count, length) in enumerate([(2, 3, 3, 2), (0, 1, 0, 1)]):
        y = made.exact(made.rings[owner, : count + length], slot)[0][count:]
        assert_as_good(out[row, :length], y, plain[row, :length])


def test_replay_advances_a_state() -> None:
    """To another slot, and for a row without steps to its own."""
    made = Replay()
    state = made.exact(made.rings[2, :3], 3)[1]
    plain = made.states.clone(), made.windows.clone()
    tail = (made.rings, made.batch_slots, made.slots, places([4, 1, -1]), places(made.counts), made.terms, 3)
    with forced("triton"), poisoned():
        gated_delta_advance(made.states, made.windows, *tail)
    with forced("reference"):
        gated_delta_advance(*plain, *tail)
    assert torch.equal(made.windows.nan_to_num(7.0), plain[1].nan_to_num(7.0))
    assert_as_good(made.states[4], state, plain[0][4], "state")
    assert torch.equal(made.states[[1, 3]], plain[0][[1, 3]]) and made.states[[0, 2]].isnan().all()
