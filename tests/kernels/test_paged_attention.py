"""Attention over pages gives the results of attention over plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import decode_attention, decode_attention_after, extend_attention, write_kv

SIZE, WIDTH = 4, 8


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 1000) -> Tensor:
    """Causal attention of the last `len(q)` positions to their latest keys, float64, one head at a time."""
    new, total, per = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // per].double().T * scale
        behind = torch.arange(total - new, total)[:, None] - torch.arange(total)
        hidden = (behind < 0) | (behind >= window)
        out[:, head] = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, head // per].double()
    return out


class Rows:
    """Rows of given lengths whose keys are in scattered pages of a pool that is otherwise NaN."""

    def __init__(self, lengths: list[int], kv_heads: int) -> None:
        self.lengths = lengths
        counts = [-(-length // SIZE) for length in lengths]
        pages = (torch.randperm(sum(counts)) + 1).split(counts)
        self.tables = torch.full((len(lengths), max(counts) + 1), -1)
        wide = torch.full((sum(counts) + 2, 3, 2, SIZE, kv_heads, WIDTH), float("nan"))
        self.pool = wide[:, 1]
        for row, own in enumerate(pages):
            self.tables[row, : counts[row]] = own
            self.pool[own] = 0.0
        self.k = [torch.randn(length, kv_heads, WIDTH) for length in lengths]
        self.v = [torch.randn(length, kv_heads, WIDTH) for length in lengths]

    def write(self, row: int, begin: int, end: int) -> None:
        positions = torch.arange(begin, end)
        places = self.tables[row][positions // SIZE] * SIZE + positions % SIZE
        write_kv(self.pool, self.k[row][begin:end], self.v[row][begin:end], places)


HEADS = [pytest.param(4, 4, id="mha"), pytest.param(6, 2, id="gqa"), pytest.param(3, 1, id="mqa")]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode(heads: int, kv_heads: int) -> None:
    rows = Rows([1, 4, 5, 63], kv_heads)
    q = torch.randn(4, heads, WIDTH)
    for row, length in enumerate(rows.lengths):
        rows.write(row, 0, length)
    out = decode_attention(q, rows.pool, rows.tables, torch.tensor(rows.lengths), 0.3, 63)
    for row in range(4):
        expected = plain(q[row : row + 1], rows.k[row], rows.v[row], 0.3)
        torch.testing.assert_close(out[row].double(), expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("old", [[0, 0, 0], [4, 0, 7], [1, 16, 3]], ids=str)
def test_extend(heads: int, kv_heads: int, old: list[int]) -> None:
    new = [1, 9, 20]
    rows = Rows([a + b for a, b in zip(old, new, strict=True)], kv_heads)
    starts = [0, 1, 10, 30]
    q = torch.randn(30, heads, WIDTH)
    for row in range(3):
        rows.write(row, 0, rows.lengths[row])
    fresh = [torch.cat([side[row][old[row] :] for row in range(3)]) for side in (rows.k, rows.v)]
    out = extend_attention(q, fresh[0], fresh[1], rows.pool, rows.tables, torch.tensor(old), torch.tensor(starts), 0.3)
    for row in range(3):
        part = slice(starts[row], starts[row + 1])
        expected = plain(q[part], rows.k[row], rows.v[row], 0.3)
        torch.testing.assert_close(out[part].double(), expected, rtol=1e-4, atol=1e-5)


def test_padding_rows_and_tokens() -> None:
    rows = Rows([5], 2)
    before = rows.pool.clone()
    write_kv(rows.pool, rows.k[0], rows.v[0], torch.full((5,), -1))
    assert torch.equal(rows.pool.nan_to_num(7.0), before.nan_to_num(7.0))
    rows.write(0, 0, 5)
    tables = torch.cat((rows.tables, torch.full_like(rows.tables, -1)))
    q = torch.randn(2, 4, WIDTH)
    out = decode_attention(q, rows.pool, tables, torch.tensor([5, 0]), 0.3, 5)
    assert (out[1] == 0).all()
    torch.testing.assert_close(out[0].double(), plain(q[:1], rows.k[0], rows.v[0], 0.3)[0], rtol=1e-4, atol=1e-5)


WINDOWS = [1, 2, 4, 5, 17]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_window_is_attention_to_the_latest_keys(heads: int, kv_heads: int, window: int) -> None:
    """Of single queries and of rows in several parts; pages before a window are NaN."""
    rows = Rows([1, 4, 5, 17, 18, 63], kv_heads)
    q = [torch.randn(length, heads, WIDTH) for length in rows.lengths]
    expected = [plain(*given, 0.3, window) for given in zip(q, rows.k, rows.v, strict=True)]
    for row, length in enumerate(rows.lengths):
        rows.write(row, 0, length)
    old = [length // 3 for length in rows.lengths]
    new = [length - begin for length, begin in zip(rows.lengths, old, strict=True)]
    for row, begin in enumerate(old):
        rows.pool[rows.tables[row, : max(begin + 1 - window, 0) // SIZE]] = torch.nan
    parts = [torch.cat([of[begin:] for of, begin in zip(side, old, strict=True)]) for side in (q, rows.k, rows.v)]
    starts = torch.tensor([0, *new]).cumsum(0)
    found = extend_attention(*parts, rows.pool, rows.tables, torch.tensor(old), starts, 0.3, window=window)
    wanted = torch.cat([of[begin:] for of, begin in zip(expected, old, strict=True)])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    for row, length in enumerate(rows.lengths):
        rows.pool[rows.tables[row, : max(length - window, 0) // SIZE]] = torch.nan
    last = torch.stack([of[-1] for of in q])
    found = decode_attention(last, rows.pool, rows.tables, torch.tensor(rows.lengths), 0.3, 63, window=window)
    torch.testing.assert_close(found.double(), torch.stack([of[-1] for of in expected]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [18, 1000])
def test_a_window_that_holds_all_keys_changes_no_bit(window: int) -> None:
    rows, old = Rows([3, 18], 2), [0, 7]
    for row, length in enumerate(rows.lengths):
        rows.write(row, 0, length)
    q, k, v = (torch.randn(14, heads, WIDTH) for heads in (4, 2, 2))
    given = q, k, v, rows.pool, rows.tables, torch.tensor(old), torch.tensor([0, 3, 14]), 0.3
    assert torch.equal(extend_attention(*given, window=window), extend_attention(*given))
    single = q[:2], rows.pool, rows.tables, torch.tensor(rows.lengths), 0.3, 18
    assert torch.equal(decode_attention(*single, window=window), decode_attention(*single))


@pytest.mark.parametrize(("first", "window"), [(1, 5), (40, 5), (60, 5), (58, 5), (40, 63)])
def test_a_window_after_a_place(first: int, window: int) -> None:
    rows = Rows([63], 2)
    rows.write(0, 0, 63)
    q, kept = torch.randn(1, 4, WIDTH), min(63 - first, window)
    given = q, rows.pool, rows.tables, torch.tensor([63])
    found = decode_attention_after(*given, first, 0.3, 63, window)
    expected = plain(q, rows.k[0][-kept:], rows.v[0][-kept:], 0.3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
