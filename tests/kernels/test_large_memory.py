"""Addresses in tensors of more than 2^31 numbers, as in the memory of one large GPU: rows of a long step, slots and
pages of a large arena, experts. Triton computes with 32 bits unless a kernel asks for 64.

The tensors are mappings of which only touched pages take memory. Of an axis of a grid with many programs, the first
and the last ones run, and a sum or product of 32 bits that overflows is an error in Triton's interpreter."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl
from delta_inputs import Inputs as DeltaInputs
from mamba_inputs import Inputs
from torch import Tensor
from triton.runtime import interpreter
from triton_kernels import DEVICE

from kernels import launch
from kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from kernels.chunk_scan import chunk_scan, plan_chunks
from kernels.dispatch import forced
from kernels.gated_delta import DeltaTerms, delta_gates, gated_delta_advance, gated_delta_scan, gated_delta_update
from kernels.gated_norm import gated_norm
from kernels.gates import add_gated, sigmoid_gate, swiglu
from kernels.linear import Linear, Quantised
from kernels.linear.reference import run_plain, run_quantised
from kernels.moe import kernel as moe
from kernels.moe import route_kernel, route_softmax
from kernels.moe.quantised_kernel import Grouping, grouped_quantised
from kernels.paged_attention import decode_attention, extend_attention, write_kv
from kernels.paged_attention import kernel as paged
from kernels.patch_embed import patch_embed
from kernels.pixel_shuffle import shuffle_norm
from kernels.rms_norm import add_rms_norm
from kernels.rotary import norm_rotate
from kernels.sample import RowParams, sample
from kernels.sample import kernel as sample_kernel
from kernels.scan_tables import ScanTables
from kernels.selective_state_update import selective_state_update
from kernels.state_replay import MambaTerms, replay_advance, replay_tokens
from kernels.varlen_attention import varlen_attention

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="needs Triton's interpreter, not a GPU")
MANY = 1000
"""Programs along an axis above which only some of them run."""
NEW = 8
"""Rows at the end of a large tensor that are not zeros."""
SEEN = 4
"""Rows at the end of a result that are compared, and programs at the end of a long axis that run."""
FIRST = 4
"""Programs at the beginning of a long axis that run."""


def far(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, max(1, math.prod(shape)) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype)[: math.prod(shape)].view(*shape)


def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
    return far(*(shape[0] if isinstance(shape[0], torch.Size) else shape), dtype=dtype)


def few(programs: int) -> Sequence[int]:
    whole = range(programs)
    return whole if programs <= MANY else [*whole[:FIRST], *whole[-SEEN:]]


def run_some(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **given: Any) -> None:
    """`InterpretedFunction.run` for some programs of the grid."""
    builder, dims = interpreter.interpreter_builder, (*grid, 1, 1)[:3]
    executor = interpreter.GridExecutor(self.rewrite(), self.arg_names, (1,))
    set_dim, set_index = type(builder).set_grid_dim, type(builder).set_grid_idx
    for place in product(*map(few, dims)):
        with (
            patch.object(builder, "set_grid_dim", lambda *_: set_dim(builder, *dims)),
            patch.object(builder, "set_grid_idx", partial(lambda at, *_: set_index(builder, *at), place)),
        ):
            executor(*args, **given)


@pytest.fixture(autouse=True)
def some_programs_without_overflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    checked = interpreter.InterpreterOptions(debug=True, sanitize_overflow=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", checked)
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run_some)
    monkeypatch.setattr(launch, "MOST_PROGRAMS", 2**31)  # rows that are this short may need more
    with patch("torch.empty", empty), torch.no_grad():
        yield


def rows(*width: int, count: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """`count` rows, by default so many that they have more than 2^31 numbers; the last ones are random."""
    made = far(count or 2**31 // math.prod(width) + NEW, *width, dtype=dtype)
    made[-NEW:] = torch.randn(NEW, *width) if dtype.is_floating_point else torch.randint(0, 9, (NEW, *width))
    return made


def compare(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for one, other in zip(*(((of,) if isinstance(of, Tensor) else of) for of in (found, expected)), strict=True):
        assert other.count_nonzero()
        torch.testing.assert_close(one.float(), other.float(), rtol=tolerance, atol=tolerance)


def check(operation: Callable[..., Any], *given: Tensor) -> None:
    """The last rows of a result are those that the reference has for the last rows alone."""
    last = [tensor[-NEW:].clone() for tensor in given]
    with forced("reference"):
        expected = operation(*last)
    with forced("triton"):
        found = operation(*given)
    ends = (tuple(x[-SEEN:] for x in ((of,) if isinstance(of, Tensor) else of)) for of in (found, expected))
    compare(*ends, 1e-2 if given[0].dtype == torch.bfloat16 else 1e-4)


@triton.jit
def _double(p_x, width, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    i_row = tl.program_id(0)
    if WIDE:
        i_row = i_row.to(tl.int64)
    tl.store(p_x + i_row * width, 2.0 * tl.load(p_x + i_row * width))


def test_an_overflow_is_an_error() -> None:
    """Otherwise the other tests would show nothing."""
    x = rows(1 << 20)
    before = x[-1, 0].item()
    _double[(x.shape[0],)](x, x.shape[1], WIDE=True)
    assert x[-1, 0].item() == 2 * before
    with pytest.raises(interpreter.InterpreterError, match="int32 overflow"):
        _double[(x.shape[0],)](x, x.shape[1], WIDE=False)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_norms() -> None:
    weight = torch.rand(256)
    check(lambda x, more: add_rms_norm(x, more, weight, 1e-5), rows(256), rows(256))
    check(lambda x, gate: gated_norm(x, gate, weight, 64, 1e-5), rows(256), rows(256))


def test_gates() -> None:
    x, weight, rates = rows(256), torch.rand(1, 256), torch.rand(2, 64)
    check(sigmoid_gate, x, rows(64, count=len(x)))
    check(swiglu, rows(512))
    check(lambda *given: add_gated(*given, weight), x, rows(256), rows(256))
    check(lambda b, a: delta_gates(b, a, -rates[0], rates[1]), rows(64), rows(64))


def test_rotation() -> None:
    x, table = rows(4, 32), torch.randn(9, 2, 16)
    check(lambda x, at: norm_rotate(x, 2, None, 0.0, table, at), x, rows(1, count=len(x), dtype=torch.int64))


@pytest.mark.parametrize("width", [128, 129], ids=["described", "pointers"])
def test_products_of_plain_rows(width: int) -> None:
    weight = torch.randn(128, 128).bfloat16()
    check(lambda x: run_plain(x[:, :128], weight, None), rows(width, dtype=torch.bfloat16))


def test_products_with_large_weights() -> None:
    x = torch.randn(1, 128)
    check(lambda weight: run_plain(x.bfloat16(), weight, None).t(), rows(128, dtype=torch.bfloat16))
    values = rows(128, dtype=torch.int8)
    scale = rows(1, count=len(values))
    check(lambda values, scale: run_quantised(x, Quantised("int8", values, scale, 128, 128), None).t(), values, scale)
    groups = rows(4)
    nibbles = rows(64, count=len(groups), dtype=torch.uint8)
    check(lambda values, scale: run_quantised(x, Quantised("int4", values, scale, 128, 32), None).t(), nibbles, groups)


def test_products_of_rows_with_a_quantised_weight() -> None:
    weight = Quantised("int8", torch.randint(-9, 9, (64, 64), dtype=torch.int8), torch.rand(64, 1), 64, 64)
    check(lambda x: run_quantised(x, weight, None), rows(64))


def test_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"BLOCK": 256, "TILE": 64, "BINS": 64, "ENTRIES": 64}.items():
        monkeypatch.setattr(sample_kernel, name, size)
    logits = rows(512)
    temperature = rows(count=len(logits))
    top_k, seeds, samples, positions = (rows(count=len(logits), dtype=torch.int64) for _ in range(4))
    top_p, min_p = (rows(count=len(logits), dtype=torch.float64) for _ in range(2))
    for parameter, value in ((temperature, 0.8), (top_p, 0.9), (min_p, 0.001)):
        parameter[-NEW:] = value
    given = temperature, top_k, top_p, min_p, seeds, samples, positions
    check(lambda logits, *given: sample(logits, RowParams(*given)), logits, *given)


def test_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_kernel, "PART", 64)
    gate = torch.randn(64, 64)
    check(lambda x: route_softmax(x, gate, 3), rows(64))


def test_patches_and_tokens() -> None:
    patches, positions, weight, table = rows(64), rows(64), torch.randn(64, 64), torch.randn(1, 64)
    projection = Linear(weight)
    projection.weight = weight
    source = far(len(patches), dtype=torch.int64)
    source[-NEW:] = torch.arange(len(patches) - NEW, len(patches)) + 1
    with forced("triton"):
        found = patch_embed(patches, projection, positions, table, source)
    compare(found[-NEW:], patches[-NEW:] @ weight.T + positions[-NEW:])
    order = far(2**31 // 256 + NEW, 4, dtype=torch.int64)
    order[-NEW:] = torch.randint(len(patches) - NEW, len(patches), (NEW, 4))
    with forced("triton"):
        merged = shuffle_norm(patches, order, None, 0.0, (torch.ones(64), torch.zeros(64), 1e-5))
    taken = torch.nn.functional.layer_norm(patches[order[-SEEN:]], (64,))
    compare(merged[-SEEN:], taken.flatten(1))


def test_attention_of_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first programs would go over all keys of the first sequence."""
    monkeypatch.setattr(sys.modules[__name__], "FIRST", 0)
    qkv = far(2**31 // (3 * 2 * 32) + 200, 3, 2, 32)
    qkv[-150:] = torch.randn(150, 3, 2, 32)
    bounds = torch.tensor([0, len(qkv) - 150, len(qkv)], dtype=torch.int32)
    with forced("triton"):
        found = varlen_attention(*qkv.unbind(1), bounds, len(qkv), scale=0.2)
    with forced("reference"):
        bounds = torch.tensor([0, 150], dtype=torch.int32)
        expected = varlen_attention(*qkv[-150:].clone().unbind(1), bounds, 150, scale=0.2)
    compare(found[-SEEN:], expected[-SEEN:])


# -- experts -----------------------------------------------------------------------------------------------------------


def squared(x: Tensor) -> Tensor:
    return x.relu().square()


@pytest.mark.parametrize("sorted_", [False, True], ids=["separate", "sorted"])
def test_products_of_pairs(sorted_: bool) -> None:
    """Of many tokens with their experts: the up product reads tokens, the down product reads pairs."""
    weight, x = torch.randn(2, 64, 64) / 8, rows(64)
    chosen = far(len(x), 2, dtype=torch.int64)
    chosen[-NEW:] = torch.tensor([1, 0])
    pairs, grouping = 2 * len(x), None
    if sorted_:
        order = far(pairs, dtype=torch.int64)
        order[-SEEN:] = torch.arange(pairs - 2 * SEEN, pairs, 2)
        grouping = Grouping(order, torch.tensor([0, pairs - SEEN, pairs]), 2)
    up, down = far(pairs, 64), far(pairs, 64)
    given: dict[str, Any] = {"experts_TK": chosen, "grouping": grouping, "activation": "relu2"}
    moe._product(x, weight, None, up, up=True, **given)
    last = pairs - 2 * SEEN if sorted_ else pairs - SEEN
    at = torch.arange(last, pairs, 2)  # the pairs of expert 1
    expected = squared(x[at // 2] @ weight[1].T)
    compare(up[at], expected)
    moe._product(up, weight, None, down, up=False, **given)
    compare(down[at], expected @ weight[1].T)


def test_sums_of_pairs() -> None:
    shares = rows(2, count=2**31 // 128 + NEW)
    pairs, out = rows(2, 64), far(len(shares), 64)
    moe._add_pairs(pairs.flatten(0, 1), shares, out)
    compare(out[-SEEN:], (pairs[-SEEN:] * shares[-SEEN:, :, None]).sum(1))


def test_products_with_many_experts() -> None:
    weight, x = rows(64, 64), torch.randn(1, 64)
    experts, out = len(weight), far(2, 64)
    chosen = torch.tensor([[experts - 1, experts - 2]])
    moe._product(x, weight, None, out, experts_TK=chosen, grouping=None, up=True, activation="relu2")
    compare(out, torch.stack([squared(x[0] @ weight[each].T) for each in chosen[0]]))
    values = rows(64, 64, dtype=torch.int8)
    scale, starts = rows(64, 1, count=experts), far(experts + 1, dtype=torch.int64)
    starts[-1] = 2
    wide = values[-1].float() * scale[-1]
    quantised = Quantised("int8", values, scale, 64, 64)
    found = grouped_quantised(x, quantised, Grouping(torch.tensor([0, 1]), starts, 2), far(2, 64), up=True)
    compare(found, (x @ wide.T).expand(2, -1))


# -- slots and pages ---------------------------------------------------------------------------------------------------


def check_slots(operation: Callable[[list[Tensor], Tensor], Any], *shapes: tuple[int, ...]) -> None:
    """The last two slots of pools of these shapes, against pools of two slots. `operation(pools, slots)`; both results
    and pools are compared."""
    count = 2**31 // min(map(math.prod, shapes)) + 2
    small = [torch.randn(2, *shape) for shape in shapes]
    large = [far(count, *shape) for shape in shapes]
    for pool, given in zip(large, small, strict=True):
        pool[-2:] = given
    with forced("reference"):
        expected = operation(small, torch.tensor([1, 0]))
    with forced("triton"):
        found = operation(large, torch.tensor([1, 0]) + count - 2)
    if expected is not None:
        compare(found, expected)
    compare([pool[-2:] for pool in large], small)


def test_states_of_mamba() -> None:
    i = Inputs(2, 4, 6, 2, 8)
    weight, bias = torch.randn(4, 56), torch.randn(56)
    terms, lengths = MambaTerms(weight, bias, i.A, i.D, i.bias, 2, 8), torch.tensor([2, 1])
    x, inputs = torch.randn(2, 56), torch.randn(2, 2, 60)
    state, window, ring = (4, 6, 8), (3, 56), (8, 60)
    check_slots(
        lambda pools, slots: selective_state_update(*pools, slots, i.x, i.dt, i.A, i.b, i.c, i.D, i.bias), state
    )
    check_slots(lambda pools, slots: causal_conv1d_update(x, weight, bias, *pools, slots), window)
    counts = torch.tensor([3, 1])

    check_slots(
        lambda pools, slots: replay_tokens(*pools, slots, slots, counts, lengths, inputs, terms, 5)[:, 0],
        state, window, ring,
    )  # fmt: skip
    check_slots(lambda pools, slots: replay_advance(*pools, slots, slots, slots, counts, terms, 3), state, window, ring)


def test_states_of_the_gated_delta_rule() -> None:
    i = DeltaInputs(2)
    channels = 2 * 2 * 8 + 4 * 6
    terms = DeltaTerms(torch.randn(4, channels), i.A, i.bias, 2, 8)
    state, window, ring = (4, 8, 6), (3, channels), (8, channels + 8)
    check_slots(lambda pools, slots: gated_delta_update(*pools, slots, i.q, i.k, i.v, i.b, i.a, i.A, i.bias), state)
    counts = torch.tensor([3, 1])
    check_slots(
        lambda pools, slots: gated_delta_advance(*pools, slots, slots, slots, counts, terms, 3), state, window, ring
    )


CHUNK, BEGIN, END = 16, 37, 5
"""Tokens of a chunk; the row's first token and the one past its last, from the end of all tokens."""


def far_tables(tokens: int) -> ScanTables:
    """Tables of one row, whose chunks are the last ones of so many that the states between them have more than 2^31
    numbers."""
    entries = 2**31 // (2 * 16 * 16) + NEW
    tables = ScanTables(far(ScanTables.length(1, entries, 0, 1), dtype=torch.int32), CHUNK, 1, entries, 0)
    first, middle, last = tokens - BEGIN, tokens - BEGIN + CHUNK, tokens - END
    tables.chunks_R1.copy_(torch.tensor([entries - 3, entries - 1]))
    tables.chunks_C4[-3:] = torch.tensor([[0, first, middle, -1], [0, middle, last, -1], [-1, last, last, -1]])
    tables.tiles_V2.copy_(torch.tensor([[0, first]]))
    return tables


def check_scan(
    scan: Callable[..., Tensor], state: tuple[int, ...], *widths: tuple[int, ...], negative: int | None = None
) -> None:
    """`scan(pool, slots, initial, starts, inputs, chunks, tables)` of the row; inputs are positive but for one."""
    count = 2**31 // 32 + BEGIN
    inputs, length = [far(count, *width) for width in widths], BEGIN - END
    for index, given in enumerate(inputs):
        given[-BEGIN:-END] = torch.rand(length, *given.shape[1:]) * (-1 if index == negative else 1)
    one = [given[-BEGIN:-END].clone() for given in inputs]
    chunks, initial = plan_chunks([length], [CHUNK], CHUNK), torch.tensor([True])
    found: list[Tensor] = []

    def run(pools: list[Tensor], slots: Tensor) -> Tensor:
        given, tables, begin = (one, None, 0) if len(pools[0]) == 2 else (inputs, far_tables(count), count - BEGIN)
        starts = torch.tensor([begin, begin + length])
        found.append(scan(pools[0], slots[:1], initial, starts, given, chunks, tables))
        return found[-1][begin : begin + length]

    check_slots(run, state)
    assert not found[-1][-END:].count_nonzero()


def test_scans() -> None:
    decay, skip = -torch.rand(2), torch.randn(2)
    check_scan(
        lambda pool, slots, initial, starts, given, *rest: chunk_scan(
            pool, slots, initial, given[0], given[1], decay, *given[2:], skip, rest[0], (), rest[1]
        ),
        (2, 16, 16), (2, 16), (2,), (1, 16), (1, 16),
    )  # fmt: skip
    check_scan(
        lambda pool, slots, initial, starts, given, *rest: gated_delta_scan(
            pool, slots, initial, *given, rest[0], (), rest[1]
        ),
        (2, 16, 16), (1, 16), (1, 16), (2, 16), (2,), (2,), negative=3,
    )  # fmt: skip
    weight = torch.randn(4, 32)
    check_scan(
        lambda pool, slots, initial, starts, given, *rest: causal_conv1d(
            given[0], weight, None, pool, slots, initial, starts, (), rest[1]
        ),
        (3, 32), (32,),
    )  # fmt: skip


@pytest.mark.parametrize("splits", [512, 32], ids=["whole", "splits"])
def test_pages(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that attend alone, and rows of several tokens, with keys and values in pages at the end of a large pool;
    the last row is that of a step with many tokens."""
    monkeypatch.setattr(paged, "SPLIT_KEYS", splits)
    q, keys = torch.randn(2, 4, 16), torch.randn(2, 2, 2, 16)
    lengths, places = torch.tensor([70, 33]), torch.tensor([69, 5 * 16])
    tables = torch.tensor([[0, 1, 2, 3, 4, 0, 0], [6, 7, 5, 0, 0, 0, 0]])

    def decode(pool: Tensor, first: int) -> Tensor:
        fresh = keys[0], keys[1], places + 16 * first
        return decode_attention(q, pool, tables + first, lengths, 0.3, 70, fresh)

    small, count = torch.randn(8, 2, 16, 2, 16), 2**31 // (2 * 16 * 2 * 16) + 8
    large = far(count, 2, 16, 2, 16)
    large[-8:] = small
    with forced("reference"):
        expected = decode(small, 0)
        write_kv(small, keys[0], keys[1], torch.tensor([-1, 3 * 16]))
    with forced("triton"):
        compare(decode(large, count - 8), expected)
        write_kv(large, keys[0], keys[1], torch.tensor([-1, (count - 5) * 16]))
    compare(large[-8:], small)


def test_rows_of_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last blocks are those of the first programs, but for the fourth, which would go over all keys of the first
    row."""
    monkeypatch.setattr(sys.modules[__name__], "FIRST", 3)
    new, old, tokens = 20, 9, 2**31 // 64 + 40
    given = [far(tokens, heads, 32) for heads in (2, 2, 2)]
    for each in given:
        each[-new:] = torch.randn(new, 2, 32)
    places = far(tokens, dtype=torch.int64)
    places[-new:] = torch.arange(16 + old, 16 + old + new)
    pool, tables = torch.randn(4, 2, 16, 2, 32), torch.tensor([[0, 0], [1, 2]])
    plain = pool.clone()
    with forced("reference"):
        rows_of = (plain, tables[1:], torch.tensor([old]), torch.tensor([0, new]), 0.2)
        expected = extend_attention(*(each[-new:].clone() for each in given), *rows_of, places[-new:])
    with forced("triton"):
        of_rows = (pool, tables, torch.tensor([0, old]), torch.tensor([0, tokens - new, tokens]), 0.2)
        found = extend_attention(*given, *of_rows, places)
    compare(found[-new:], expected)
    compare(pool[1:], plain[1:])  # the first page has what tokens of the first row have written
