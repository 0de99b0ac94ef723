"""The Mamba-2 kernels in Triton compared with the definitions in float64, and with the references bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mamba_inputs import NO_LIMIT, Inputs, by_definition, recurrence
from torch import Tensor
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.causal_conv1d import causal_conv1d, causal_conv1d_tokens, causal_conv1d_update
from kernels.chunk_scan import chunk_scan, plan_chunks
from kernels.dispatch import forced
from kernels.gated_norm import gated_norm
from kernels.gated_norm import reference as norm_reference
from kernels.scan_tables import ScanTables
from kernels.selective_state_update import discretise, selective_state_update, selective_state_update_tokens
from kernels.state_replay import MambaTerms, replay_advance, replay_tokens

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
NAN = float("nan")


def places(values: list[Any]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "groups", "size"), [(0, 2, 8), (3, 1, 5), (2, 3, 70), (1, 2, 600)], ids=str)
@pytest.mark.parametrize("order", ["gate-first", "norm-first", "gate-only"])
def test_gated_norm(rows: int, groups: int, size: int, dtype: torch.dtype, order: str) -> None:
    norm_first, scale = order == "norm-first", 1.0 if order == "gate-first" else 0.7
    y, weight = torch.randn(rows, groups * size, device=DEVICE), torch.randn(groups * size, device=DEVICE)
    gate = (torch.randn(rows, groups * size + 3, device=DEVICE) * 2).to(dtype)[:, : groups * size]
    given = (y, gate, None if order == "gate-only" else weight, size, 1e-5)
    with forced("triton"), poisoned():
        found = gated_norm(*given, norm_first=norm_first, gate_scale=scale)
    assert found.dtype == dtype and found.shape == y.shape
    if rows:
        silu = torch.nn.functional.silu(scale * gate.double())
        exact = y.double() if norm_first else y.double() * silu
        if order != "gate-only":
            v = exact.unflatten(1, (groups, size))
            exact = (v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight.double()
        exact = exact * silu if norm_first else exact
        assert_as_good(found, exact, norm_reference.gated_norm(*given, norm_first=norm_first, gate_scale=scale))


@pytest.mark.parametrize("limit", [NO_LIMIT, (0.5, 1.0)], ids=["free", "limited"])
@pytest.mark.parametrize("shape", [(6, 5, 2, 8), (3, 1, 3, 4), (4, 20, 1, 130)], ids=str)
def test_update(limit: tuple[float, float], shape: tuple[int, int, int, int]) -> None:
    i = Inputs(4, *shape).to(DEVICE)
    pool = i.pool(6)
    before, slots = pool.clone(), [4, 0, -1, 2]
    pool[[1, 3, 5]] = NAN
    given = (places(slots), i.x, i.dt, i.A, i.b, i.c, i.D, i.bias, limit)
    plain_pool = before.clone()
    with forced("triton"), poisoned():
        out = selective_state_update(pool, *given)
    with forced("reference"):
        plain = selective_state_update(plain_pool, *given)
    for row, slot in enumerate(slots):
        y, h = recurrence(i, slice(row, row + 1), before[slot] if slot >= 0 else torch.zeros_like(before[0]), limit)
        assert_as_good(out[row], y[0], plain[row])
        if slot >= 0:
            assert_as_good(pool[slot], h, plain_pool[slot], "state")
    assert pool[[1, 3, 5]].isnan().all()


def test_several_tokens() -> None:
    """Rows that start from their second and first slot, one of which is shorter, and one of padding."""
    i = Inputs(9, 4, 20, 2, 17).to(DEVICE)
    pool, slots = i.pool(8), [[4, 0, 6], [2, 7, 1], [-1, -1, -1]]
    pool[[1, 5, 6]] = NAN
    before, plain_pool = pool.clone(), pool.clone()
    rows = (places(slots), places([2, 1, 1]), places([3, 2, 0]))
    x, dt, b, c = (t.unflatten(0, (3, 3)) for t in (i.x, i.dt, i.b, i.c))
    given = (*rows, x, dt, i.A, b, c, i.D, i.bias)
    with forced("triton"), poisoned():
        out = selective_state_update_tokens(pool, *given)
    with forced("reference"):
        plain = selective_state_update_tokens(plain_pool, *given)
    for row, (read, length) in enumerate([(0, 3), (2, 2)]):
        for token in range(length):
            y, h = recurrence(i, slice(3 * row, 3 * row + token + 1), before[read])
            assert_as_good(out[row, token], y[-1], plain[row, token])
            assert_as_good(pool[slots[row][token]], h, plain_pool[slots[row][token]], "state")
    assert out.isfinite().all() and pool[[1, 5]].isnan().all()


@pytest.mark.parametrize("taps", [2, 4, 8])
def test_several_tokens_of_a_convolution(taps: int) -> None:
    weight, bias = torch.randn(taps, 20, device=DEVICE), torch.randn(20, device=DEVICE)
    x, pool = torch.randn(3, 3, 20, device=DEVICE), torch.randn(8, taps - 1, 20, device=DEVICE)
    slots = [[4, 0, 6], [2, 7, 1], [-1, -1, -1]]
    pool[[1, 5, 6]] = NAN
    before, plain_pool = pool.clone(), pool.clone()
    given = (x, weight, bias)
    rows = (places(slots), places([2, 1, 1]), places([3, 2, 0]))
    with forced("triton"), poisoned():
        out = causal_conv1d_tokens(*given, pool, *rows)
    with forced("reference"):
        plain = causal_conv1d_tokens(*given, plain_pool, *rows)
    assert torch.equal(pool.nan_to_num(7.0), plain_pool.nan_to_num(7.0)) and out.isfinite().all()
    for row, read in ((0, 0), (1, 2)):
        assert_as_good(out[row], by_definition(x[row], before[read], weight, bias), plain[row])


def test_small_steps_do_not_vanish() -> None:
    """softplus of -30 as log(1 + exp) would be 0; of 50 it is 50."""
    i = Inputs(2, 1, 1, 1, 1).to(DEVICE)
    i.dt, i.bias = torch.tensor([[-30.0], [50.0]], device=DEVICE), torch.zeros(1, device=DEVICE)
    i.A, i.D = torch.tensor([-1e-3], device=DEVICE), torch.zeros(1, device=DEVICE)
    pool = torch.zeros(2, 1, 1, 1, device=DEVICE)
    with forced("triton"):
        selective_state_update(pool, places([0, 1]), i.x, i.dt, i.A, i.b, i.c, i.D, i.bias)
    step = (pool.flatten() / (i.x * i.b).flatten()).tolist()
    assert step == pytest.approx([9.357623e-14, 50.0], rel=1e-5)


def test_states_of_sixteen_bits_are_rounded_once() -> None:
    i = Inputs(2).to(DEVICE)
    pool = i.pool(2).bfloat16()
    before = pool.float()
    with forced("triton"), poisoned():
        out = selective_state_update(
            pool, places([1, 0]), i.x.bfloat16(), i.dt, i.A, i.b.bfloat16(), i.c.bfloat16(), i.D, i.bias
        )
    assert out.dtype == torch.bfloat16
    i.x, i.b, i.c = (t.bfloat16().float() for t in (i.x, i.b, i.c))
    for row, slot in enumerate((1, 0)):
        h = recurrence(i, slice(row, row + 1), before[slot])[1]
        assert_as_good(pool[slot], h, h.bfloat16(), "state")


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, slots: list[int], initial: list[bool],
    lengths: list[int], saves: list[tuple[int, int, int]], tables: ScanTables | None,
) -> Tensor:  # fmt: skip
    starts = places([0, *torch.tensor(lengths).cumsum(0).tolist()])
    flags = torch.tensor(initial, device=DEVICE)
    return causal_conv1d(x, weight, bias, pool, places(slots), flags, starts, saves, tables)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 4, 7])
@pytest.mark.parametrize(
    ("lengths", "slots", "saves"),
    [
        pytest.param([1, 2], [3, 0], [], id="shorter-than-the-window"),
        pytest.param([70, 0, 5], [1, -1, -1], [(0, 1, 2), (0, 2, 5), (0, 33, 6)], id="saves"),
        pytest.param([3, 33, 64], [5, 2, 0], [(1, 36, 7), (2, 37, 3)], id="a-save-at-the-end"),
    ],
)
def test_packed_convolution(
    lengths: list[int], slots: list[int], saves: list[tuple[int, int, int]], taps: int, dtype: torch.dtype
) -> None:
    channels, total = 20, sum(lengths)
    weight, bias = torch.randn(taps, channels, device=DEVICE), torch.randn(channels, device=DEVICE)
    x = torch.randn(total, channels + 5, device=DEVICE).to(dtype)[:, :channels]
    pool = torch.randn(9, 2, taps - 1, channels, device=DEVICE).to(dtype)[:, 0]
    initial = [row % 2 == 0 for row in range(len(slots))]
    pool[[slot for slot, known in zip(slots, initial) if not known and slot >= 0]] = NAN
    plain_pool = pool.clone()
    given = (weight, bias if taps >= 4 else None)
    room = ScanTables.room(total, 5, 4, 4)
    tables = ScanTables.of(lengths, [0] * len(lengths), 4, saves, device=DEVICE, padded=room)
    with forced("triton"), poisoned():
        out = convolved(x, *given, pool, slots, initial, lengths, saves, tables)
    with forced("reference"):
        plain = convolved(x, *given, plain_pool.clone(), slots, initial, lengths, saves, None)
        convolved(x, *given, plain_pool, slots, initial, lengths, saves, None)
    before = torch.zeros(taps - 1, channels, device=DEVICE)
    assert torch.equal(pool.nan_to_num(7.0), plain_pool.nan_to_num(7.0))
    assert out.dtype == dtype and out.isfinite().all()
    begin = sum(lengths[:1])
    exact = by_definition(x[begin : begin + lengths[1]], before, *given) if lengths[1] else None
    if exact is not None:  # the second row starts from zeros
        assert_as_good(out[begin : begin + lengths[1]], exact, plain[begin : begin + lengths[1]].to(dtype))
    assert_as_good(out, plain.double(), plain.to(dtype))


def test_a_convolution_without_tables_is_refused() -> None:
    x, pool = torch.randn(3, 4, device=DEVICE), torch.zeros(1, 3, 4, device=DEVICE)
    with forced("triton"), pytest.raises(ValueError, match="needs tables"):
        convolved(x, torch.randn(4, 4, device=DEVICE), None, pool, [0], [False], [3], [], None)
    with forced("triton"), pytest.raises(ValueError, match="2 to 8 taps, the model has 9"):
        causal_conv1d_update(x, torch.randn(9, 4, device=DEVICE), None, pool, places([0, 0, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
def test_convolution_update(taps: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(taps, 300, device=DEVICE), torch.randn(300, device=DEVICE)
    x = torch.randn(3, 301, device=DEVICE).to(dtype)[:, :300]
    pool = torch.randn(4, 2, taps - 1, 300, device=DEVICE).to(dtype)[:, 0]
    pool[1] = NAN
    plain_pool, before = pool.clone(), pool.clone()
    slots = places([2, -1, 0])
    with forced("triton"), poisoned():
        out = causal_conv1d_update(x, weight, bias, pool, slots)
    with forced("reference"):
        plain = causal_conv1d_update(x, weight, bias, plain_pool, slots)
    assert torch.equal(pool.nan_to_num(7.0), plain_pool.nan_to_num(7.0))
    for row, slot in enumerate(slots.tolist()):
        window = before[slot] if slot >= 0 else torch.zeros_like(before[0])
        assert_as_good(out[row], by_definition(x[row : row + 1], window, weight, bias)[0], plain[row].to(dtype))


def test_tables_say_what_they_were_made_of() -> None:
    room = {"rows": 4, "entries": 8, "saves": 4, "tiles": 5}
    tables = ScanTables.of([9, 0, 40], [5, 0, 64], 32, [(2, 49, 8), (0, 4, 7), (0, 4, 6)], padded=room)
    assert tables.chunks_R1.tolist() == [0, 3, 3, 5, 5]
    assert tables.chunks_C4.tolist() == [
        [0, 0, 4, 6], [0, 4, 4, 7], [0, 4, 9, -1], [2, 9, 41, -1], [2, 41, 49, 8],
        [-1, 49, 49, -1], [-1, 49, 49, -1], [-1, 49, 49, -1],
    ]  # fmt: skip
    assert tables.saves_R1.tolist() == [0, 2, 2, 3, 3]
    assert tables.saves_V2.tolist() == [[4, 6], [4, 7], [49, 8], [-1, -1]]
    assert tables.tiles_V2.tolist() == [[0, 0], [2, 9], [2, 41], [-1, -1], [-1, -1]]
    enough = ScanTables.room(49, 3, 3, 32)
    assert ScanTables.of([9, 0, 40], [5, 0, 64], 32, [(2, 49, 8), (0, 4, 7), (0, 4, 6)], padded=enough).rows == 3
    with pytest.raises(ValueError, match="room for 2 tiles, the step has 3"):
        ScanTables.of([9, 0, 40], [5, 0, 64], 32, padded={"tiles": 2})


def scanned(
    i: Inputs, dt: Tensor, pool: Tensor, slots: list[int], lengths: list[int], computed: list[int], chunk: int,
    saves: list[tuple[int, int, int]], choice: str, spare: int = 0,
) -> Tensor:  # fmt: skip
    """`chunk_scan` with the arguments of each implementation; `saves`: (row, packed end, slot); `spare` tokens and two
    rows are padding."""
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
        return chunk_scan(pool, *given, i.x, dt, i.A, i.b, i.c, i.D, chunks, state_saves, tables)


@pytest.mark.parametrize(
    ("shape", "lengths", "computed", "chunk"),
    [
        pytest.param((6, 5, 2, 8), [5, 0, 9], [3, 7, 0], 4, id="odd-4"),
        pytest.param((2, 20, 1, 17), [33, 1], [16, 31], 16, id="odd-16"),
        pytest.param((2, 16, 1, 16), [135], [0], 128, id="two-halves-128"),
    ],
)
def test_scan(shape: tuple[int, int, int, int], lengths: list[int], computed: list[int], chunk: int) -> None:
    i = Inputs(sum(lengths) + 3, *shape).to(DEVICE)
    i.x[-3:] = NAN  # tokens that pad a graph's buffers
    dt = discretise(i.dt, i.bias, NO_LIMIT)
    pool, slots = i.pool(9), [3, 0, 8][: len(lengths)]
    before, end = pool.clone(), sum(lengths)
    saves = {4: [(2, end - 1, 5), (0, 2, 2), (0, 2, 6)], 16: [(0, 33, 2)], 128: [(0, 67, 5)]}[chunk]
    pool[[slot for slot in range(9) if slot not in slots]] = NAN
    pool[[slot for slot, old in zip(slots, computed) if not old]] = NAN
    plain_pool = pool.clone()
    with poisoned():
        out = scanned(i, dt, pool, slots, lengths, computed, chunk, saves, "triton", spare=3)
    plain = scanned(i, dt, plain_pool, slots, lengths, computed, chunk, saves, "reference")
    assert out[end:].eq(0).all() and out.shape == i.x.shape
    for row, slot in enumerate(slots):
        part = slice(sum(lengths[:row]), sum(lengths[: row + 1]))
        if not lengths[row]:
            assert torch.equal(pool[slot], before[slot])
            continue
        initial = before[slot] if computed[row] else torch.zeros_like(before[slot])
        y, h = recurrence(i, part, initial)
        assert_as_good(out[part], y, plain[part])
        assert_as_good(pool[slot], h, plain_pool[slot], "state")
        for _, stop, target in [save for save in saves if save[0] == row]:
            kept = recurrence(i, slice(part.start, stop), initial)[1]
            assert_as_good(pool[target], kept, plain_pool[target], "kept state")
    untouched = [slot for slot in range(9) if slot not in {*slots, *(slot for _, _, slot in saves)}]
    assert pool[untouched].isnan().all()


def test_a_scan_in_bfloat16_is_as_good_as_torch() -> None:
    i = Inputs(40, 4, 16, 2, 16).to(DEVICE)
    dt = discretise(i.dt, i.bias, NO_LIMIT)
    i.x, i.b, i.c = (t.bfloat16() for t in (i.x, i.b, i.c))
    pool = i.pool(1)
    before = pool[0].clone()
    with poisoned():
        out = scanned(i, dt, pool, [0], [40], [8], 16, [], "triton")
    y, h = recurrence(i, slice(0, 40), before)
    plain, state = [], before.clone()  # one token after another, in bfloat16 but for the state
    for t in range(40):
        scaled = (i.x[t] * dt[t, :, None].bfloat16()).float()
        b, c = (part[t].repeat_interleave(2, 0) for part in (i.b, i.c))
        state = state * torch.exp(dt[t] * i.A)[:, None, None] + scaled[:, :, None] * b[:, None].float()
        plain.append((state.bfloat16() @ c[:, :, None])[..., 0] + i.D.bfloat16()[:, None] * i.x[t])
    assert out.dtype == torch.bfloat16
    assert_as_good(out, y, torch.stack(plain))
    assert_as_good(pool[0], h, state, "state")


@pytest.mark.parametrize("split", [4, 20])
def test_a_scan_split_at_a_chunk_is_bitwise_the_same(split: int) -> None:
    i = Inputs(30, 2, 5, 1, 8).to(DEVICE)
    dt = discretise(i.dt, i.bias, NO_LIMIT)
    whole, parts = i.pool(1), i.pool(1)
    expected = scanned(i, dt, whole, [0], [30], [0], 4, [], "triton")
    halves = []
    for begin, end in ((0, split), (split, 30)):
        j = Inputs(end - begin, 2, 5, 1, 8)
        j.x, j.b, j.c, j.A, j.D = i.x[begin:end], i.b[begin:end], i.c[begin:end], i.A, i.D
        halves.append(scanned(j, dt[begin:end], parts, [0], [end - begin], [begin], 4, [], "triton"))
    assert torch.equal(torch.cat(halves), expected) and torch.equal(parts, whole)


class Replay:
    """A layer with 2 groups of 2 heads x 6, state 8, and rings of 8 steps; rows: two, and one of padding."""

    def __init__(self) -> None:
        self.i = Inputs(8, 4, 6, 2, 8).to(DEVICE)
        channels = 4 * 6 + 2 * 2 * 8
        weight, bias = torch.randn(4, channels, device=DEVICE), torch.randn(channels, device=DEVICE)
        self.terms = MambaTerms(weight, bias, self.i.A, self.i.D, self.i.bias, 2, 8)
        self.states, self.windows = self.i.pool(5), torch.randn(5, 3, channels, device=DEVICE)
        self.rings = torch.full((4, 8, channels + 4), NAN, device=DEVICE)
        self.counts = [3, 0, 0]
        self.rings[2, :3] = torch.randn(3, channels + 4, device=DEVICE)
        self.states[[0, 2, 4]], self.windows[[0, 2, 4]] = NAN, NAN
        self.batch_slots, self.slots = places([2, 0, -1]), places([3, 1, -1])

    def exact(self, ring: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """(outputs, state after them) of a ring's steps, starting from a slot, float64."""
        conv_in, dt = ring.split([ring.shape[1] - 4, 4], dim=1)
        mixed = by_definition(conv_in, self.windows[slot], self.terms.conv_WC, self.terms.conv_bias_C)
        i = Inputs(ring.shape[0], 4, 6, 2, 8)
        i.A, i.D, i.bias, i.dt = self.i.A, self.i.D, self.i.bias, dt
        x, b, c = mixed.split([24, 16, 16], dim=1)
        i.x, i.b, i.c = x.unflatten(1, (4, 6)), b.unflatten(1, (2, 8)), c.unflatten(1, (2, 8))
        return recurrence(i, slice(0, ring.shape[0]), self.states[slot])


def test_replayed_tokens() -> None:
    made = Replay()
    inputs = torch.randn(3, 2, made.rings.shape[2], device=DEVICE)
    lengths, plain_rings = places([2, 1, 0]), made.rings.clone()
    tail = (made.batch_slots, made.slots, places(made.counts), lengths, inputs, made.terms, 5)
    before = made.states.clone()
    with forced("triton"), poisoned():
        out = replay_tokens(made.states, made.windows, made.rings, *tail)
    with forced("reference"):
        plain = replay_tokens(made.states, made.windows, plain_rings, *tail)
    assert torch.equal(made.rings.nan_to_num(7.0), plain_rings.nan_to_num(7.0)) and out.isfinite().all()
    assert torch.equal(made.states.nan_to_num(7.0), before.nan_to_num(7.0))
    for row, (batch_slot, slot, count, length) in enumerate([(2, 3, 3, 2), (0, 1, 0, 1)]):
        y = made.exact(made.rings[batch_slot, : count + length], slot)[0][count:]
        assert_as_good(out[row, :length], y, plain[row, :length])


def test_tokens_behind_a_full_ring_are_finite() -> None:
    """Padding of a row whose ring has no more room, with a decay whose inverse over the ring is too large a number."""
    made = Replay()
    made.rings[2, :7] = torch.randn(7, made.rings.shape[2], device=DEVICE)
    made.i.A.fill_(-30.0)
    inputs = torch.randn(1, 4, made.rings.shape[2], device=DEVICE)
    rows = (made.batch_slots[:1], made.slots[:1], places([7]), places([1]))
    with forced("triton"), poisoned():
        out = replay_tokens(made.states, made.windows, made.rings, *rows, inputs, made.terms, 8)
    assert out.isfinite().all()


def test_replay_advances_a_state() -> None:
    """To another slot, and for a row without steps to its own."""
    made = Replay()
    y, state = made.exact(made.rings[2, :3], 3)
    plain = made.states.clone(), made.windows.clone()
    tail = (made.rings, made.batch_slots, made.slots, places([4, 1, -1]), places(made.counts), made.terms, 3)
    with forced("triton"), poisoned():
        replay_advance(made.states, made.windows, *tail)
    with forced("reference"):
        replay_advance(*plain, *tail)
    assert torch.equal(made.windows.nan_to_num(7.0), plain[1].nan_to_num(7.0))
    assert_as_good(made.states[4], state, plain[0][4], "state")
    assert torch.equal(made.states[[1, 3]], plain[0][[1, 3]]) and made.states[[0, 2]].isnan().all()
