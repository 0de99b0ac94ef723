"""Attention kernels under Triton's interpreter compared with float64, with the error of torch in the same dtype as the
limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_kernels import DEVICE, assert_as_good, poisoned

from kernels.launch import recording
from kernels.paged_attention import kernel as paged
from kernels.paged_attention import reference as paged_reference
from kernels.varlen_attention import kernel as varlen

SIZE = 4
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(autouse=True)
def on_device_and_unwritten_is_nan() -> Iterator[None]:
    with DEVICE, poisoned():
        yield


class Pages:
    """Rows of given lengths in scattered pages of a strided pool; other memory is NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, width: int, dtype: torch.dtype) -> None:
        self.lengths = lengths
        counts = [-(-length // SIZE) for length in lengths]
        self.tables = torch.full((len(lengths), max(counts) + 1), -1)
        wide = torch.full((sum(counts) + 1, 2, 2, SIZE, kv_heads, width), float("nan"), dtype=dtype)
        self.pool = wide[:, 1]
        for row, own in enumerate((torch.randperm(sum(counts)) + 1).split(counts)):
            self.tables[row, : counts[row]] = own
        self.k, self.v = ([torch.randn(length, kv_heads, width).to(dtype) for length in lengths] for _ in range(2))

    def places(self, row: int, begin: int, end: int) -> Tensor:
        positions = torch.arange(begin, end)
        return self.tables[row][positions // SIZE] * SIZE + positions % SIZE

    def write(self, row: int, end: int, begin: int = 0) -> None:
        begin = min(begin, end)
        k, v = self.k[row][begin:end], self.v[row][begin:end]
        paged_reference.write_kv(self.pool, k, v, self.places(row, begin, end))


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype, window: int = 1000) -> Tensor:
    """Attention of the last `len(q)` of k's positions to their latest keys, in `dtype`, one head at a time."""
    new, total, per = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    behind = torch.arange(total - new, total)[:, None] - torch.arange(total)
    hidden = (behind < 0) | (behind >= window)
    outs = [
        (q[:, h].to(dtype) @ k[:, h // per].to(dtype).T * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        @ v[:, h // per].to(dtype)
        for h in range(q.shape[1])
    ]
    return torch.stack(outs, 1)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 keys, so that a short row has several and other rows have empty ones."""
    monkeypatch.setattr(paged, "SPLIT_KEYS", 32)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("fused", [False, True], ids=["read", "fused"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(5, 1, 16), (4, 2, 24), (3, 1, 256)])
def test_decode(heads: int, kv_heads: int, width: int, dtype: torch.dtype, fused: bool) -> None:
    pages = Pages([1, 5, 150, 1], kv_heads, width, dtype)
    lengths, q = torch.tensor([1, 5, 150, 0]), torch.randn(4, heads, width).to(dtype)
    for row, length in enumerate(lengths.tolist()):
        pages.write(row, max(length - fused, 0))
    fresh = None
    if fused:
        last = [length - 1 for length in pages.lengths]
        k, v = (torch.stack([side[row][at] for row, at in enumerate(last)]) for side in (pages.k, pages.v))
        places = torch.cat([pages.places(row, at, at + 1) for row, at in enumerate(last)])
        places[3] = -1
        fresh = k, v, places
    out = paged.decode_attention(q, pages.pool, pages.tables, lengths, 0.3, 150, fresh)
    assert (out[3] == 0).all()
    for row in range(3):
        given = q[row : row + 1], pages.k[row], pages.v[row], 0.3
        assert_as_good(out[row], causal(*given, torch.float64)[0], causal(*given, dtype)[0])
        stored = pages.pool[pages.tables[row, : -(-pages.lengths[row] // SIZE)]]
        assert torch.equal(stored[:, 0].flatten(0, 1)[: pages.lengths[row]], pages.k[row])
        assert torch.equal(stored[:, 1].flatten(0, 1)[: pages.lengths[row]], pages.v[row])


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("length", [31, 32, 33, 64, 65, 1024])
def test_splits_of_a_row_do_not_depend_on_the_longest_row(length: int, window: int | None) -> None:
    """As many keys as splits can hold are one block more with the new key in a block of its own."""
    pages = Pages([length], 2, 16, torch.float32)
    pages.write(0, length - 1)
    q, fresh = torch.randn(1, 4, 16), (pages.k[0][-1:], pages.v[0][-1:], torch.tensor([-1]))
    given = q, pages.pool, pages.tables, torch.tensor([length]), 0.3
    alone = paged.decode_attention(*given, length, fresh, window)
    assert torch.equal(paged.decode_attention(*given, 5000, fresh, window), alone)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(("first", "window"), [(1, None), (40, None), (40, 20)])
def test_decode_after_a_place(first: int, window: int | None) -> None:
    """Keys before the place are NaN; a row that ends before it gives zeros."""
    pages = Pages([1, 45, 90], 2, 24, torch.float32)
    q = torch.randn(3, 4, 24)
    for row, length in enumerate(pages.lengths):
        if length > first:
            at = pages.places(row, first, length)
            paged_reference.write_kv(pages.pool, pages.k[row][first:], pages.v[row][first:], at)
    lengths = torch.tensor(pages.lengths)
    out = paged.decode_attention_after(q, pages.pool, pages.tables, lengths, first, 0.3, 90, window)
    assert (out[0] == 0).all()
    for row in (1, 2):
        begin = max(first, pages.lengths[row] - (window or 90))
        given = q[row : row + 1], pages.k[row][begin:], pages.v[row][begin:], 0.3
        assert_as_good(out[row], causal(*given, torch.float64)[0], causal(*given, torch.float32)[0])


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("old", "new", "heads", "width"),
    [
        ([0, 7, 36, 0, 12], [18, 1, 4, 0, 3], 6, 16),
        ([3, 40, 9], [4, 4, 4], 6, 16),
        ([0, 7, 36], [18, 1, 4], 12, 256),
    ],
    ids=["mixed", "speculative", "heads-of-256-by-6"],
)
def test_extend_with_fused_write(old: list[int], new: list[int], heads: int, width: int, dtype: torch.dtype) -> None:
    kv_heads, padding, scale = 2, 5, width**-0.5
    rows = len(old)
    pages = Pages([a + b for a, b in zip(old, new, strict=True)], kv_heads, width, dtype)
    starts = [sum(new[:row]) for row in range(rows + 1)]
    q = torch.randn(starts[-1] + padding, heads, width).to(dtype)
    fresh, places = [], []
    for row in range(rows):
        pages.write(row, old[row])
        places.append(pages.places(row, old[row], pages.lengths[row]))
    for side in (pages.k, pages.v):
        behind = torch.full((padding, kv_heads, width), float("nan"), dtype=dtype)
        fresh.append(torch.cat([*(side[row][old[row] :] for row in range(rows)), behind]))
    where = torch.cat([*places, torch.full((padding,), -1)])
    out = paged.extend_attention(
        q, fresh[0], fresh[1], pages.pool, pages.tables, torch.tensor(old), torch.tensor(starts), scale, where
    )
    assert (out[starts[-1] :] == 0).all()
    for row in range(rows):
        part = slice(starts[row], starts[row + 1])
        given = q[part], pages.k[row], pages.v[row], scale
        if new[row]:
            assert_as_good(out[part], causal(*given, torch.float64), causal(*given, dtype))
            stored = pages.pool[pages.tables[row, : -(-pages.lengths[row] // SIZE)]]
            assert torch.equal(stored[:, 0].flatten(0, 1)[: pages.lengths[row]], pages.k[row])


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("fused", [False, True], ids=["read", "fused"])
@pytest.mark.parametrize(
    ("window", "dtype"), [(1, torch.float32), (16, torch.float32), (33, torch.bfloat16), (1000, torch.float32)]
)
def test_decode_in_a_window(window: int, dtype: torch.dtype, fused: bool) -> None:
    """Keys before the window are NaN."""
    pages = Pages([1, 17, 33, 65, 100, 1], 2, 24, dtype)
    lengths, q = torch.tensor([1, 17, 33, 65, 100, 0]), torch.randn(6, 4, 24).to(dtype)
    for row, length in enumerate(lengths.tolist()):
        pages.write(row, max(length - fused, 0), max(length - window, 0))
    fresh = None
    if fused:
        last = [length - 1 for length in pages.lengths]
        k, v = (torch.stack([side[row][at] for row, at in enumerate(last)]) for side in (pages.k, pages.v))
        places = torch.cat([pages.places(row, at, at + 1) for row, at in enumerate(last)])
        places[5] = -1
        fresh = k, v, places
    out = paged.decode_attention(q, pages.pool, pages.tables, lengths, 0.3, 100, fresh, window)
    assert (out[5] == 0).all()
    for row in range(5):
        given = q[row : row + 1], pages.k[row][-window:], pages.v[row][-window:], 0.3
        assert_as_good(out[row], causal(*given, torch.float64)[0], causal(*given, dtype)[0])


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize(("window", "dtype"), [(1, torch.float32), (16, torch.bfloat16), (31, torch.float32)])
def test_extend_in_a_window(window: int, dtype: torch.dtype) -> None:
    """Keys before the window of a row's first new token are NaN, and what is stored of them too."""
    old, new, padding = [0, 7, 70, 0, 33], [20, 1, 4, 0, 18], 3
    pages = Pages([a + b for a, b in zip(old, new, strict=True)], 2, 16, dtype)
    starts = [sum(new[:row]) for row in range(6)]
    q = torch.randn(starts[-1] + padding, 6, 16).to(dtype)
    for row in range(5):
        pages.write(row, old[row], max(old[row] + 1 - window, 0))
    where = torch.cat([*(pages.places(row, old[row], pages.lengths[row]) for row in range(5)), torch.full((3,), -1)])
    behind = torch.full((padding, 2, 16), float("nan"), dtype=dtype)
    fresh = [torch.cat([*(of[row][old[row] :] for row in range(5)), behind]) for of in (pages.k, pages.v)]
    out = paged.extend_attention(
        q, *fresh, pages.pool, pages.tables, torch.tensor(old), torch.tensor(starts), 0.25, where, window
    )
    assert (out[starts[-1] :] == 0).all()
    for row in range(5):
        part = slice(starts[row], starts[row + 1])
        given = q[part], pages.k[row], pages.v[row], 0.25
        if new[row]:
            assert_as_good(out[part], causal(*given, torch.float64, window), causal(*given, dtype, window))


@pytest.mark.usefixtures("short_splits")
def test_splits_without_keys_store_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of short rows beside a long one, or in a graph for long ones. What is not written stays NaN."""
    parts: list[Tensor] = []

    def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        parts.append(arguments["p_part"])
        launched(kernel, grid, **arguments)

    launched = paged.launch
    monkeypatch.setattr(paged, "launch", launch)
    pages = Pages([5, 70, 1], 2, 16, torch.float32)
    for row, length in enumerate(pages.lengths):
        pages.write(row, length)
    lengths = torch.tensor([5, 70, 0])
    paged.decode_attention(torch.randn(3, 4, 16), pages.pool, pages.tables, lengths, 0.3, 1024)
    written = parts[0].isfinite().all(-1).all(-1)
    assert written.shape[0] == 32 and written.sum(0).tolist() == [1, 3, 0]


def test_a_window_determines_the_splits_of_long_contexts() -> None:
    """A decode step in a graph, whose bound on the keys is that of the longest context."""
    q, pool = torch.zeros(2, 4, 16), torch.zeros(3, 2, SIZE, 2, 16)
    tables, lengths = torch.zeros(2, 10_000, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    grids = []
    for window in (None, 256, 2000):
        with recording("sm_90") as launches:
            paged.decode_attention(q, pool, tables, lengths, 0.3, 40_000, None, window)
        grids.append(launches[0].arguments["SPLITS"])
    assert grids == [32, 1, 4]


def test_write_skips_what_has_no_place() -> None:
    pages = Pages([6], 2, 24, torch.float32)
    before = pages.pool.clone()
    places = pages.places(0, 0, 6)
    places[[1, 4]] = -1
    paged.write_kv(pages.pool, pages.k[0], pages.v[0], places)
    paged_reference.write_kv(before, pages.k[0], pages.v[0], places)
    assert torch.equal(pages.pool.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 64, 72, 80, 96])
def test_varlen(width: int, dtype: torch.dtype) -> None:
    bounds = [0, 0, 1, 64, 64, 130, 141]
    qkv = torch.randn(141, 3, 2, width).to(dtype)
    q, k, v = qkv.unbind(1)
    out = varlen.varlen_attention(q, k, v, torch.tensor(bounds, dtype=torch.int32), 141, scale=width**-0.5)
    for begin, end in zip(bounds, bounds[1:]):
        exact, same = (
            torch.cat(
                [
                    ((a[:, h] @ b[:, h].T) * width**-0.5).softmax(-1)[:, None] @ c[None, :, h]
                    for h in range(2)
                    for a, b, c in [[x[begin:end].to(kind) for x in (q, k, v)]]
                ],
                1,
            )
            for kind in (torch.float64, dtype)
        )
        if end > begin:
            assert_as_good(out[begin:end], exact, same)


def test_varlen_heads_share_keys_and_values_in_order() -> None:
    bounds = torch.tensor([0, 1, 64, 141], dtype=torch.int32)
    q, k, v = torch.randn(141, 8, 24).split((4, 2, 2), 1)
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))
    shared = varlen.varlen_attention(q, k, v, bounds, 141, scale=0.2)
    assert torch.equal(shared, varlen.varlen_attention(q, *repeated, bounds, 141, scale=0.2))


def test_head_parts_cover_the_width_in_powers_of_two() -> None:
    found = {width: varlen.head_parts(width) for width in (8, 64, 72, 80, 96, 112, 128)}
    wanted = {8: (16, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 112: (128, 0), 128: (128, 0)}
    assert found == wanted
