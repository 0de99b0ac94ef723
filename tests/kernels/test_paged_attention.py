"""Attention over pages gives the results of attention over plain tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import decode_attention, extend_attention, write_kv

SIZE, WIDTH = 4, 8


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last `len(q)` positions, float64, one head at a time."""
    new, total, per = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        scores = q[:, head].double() @ k[:, head // per].double().T * scale
        hidden = torch.arange(total) > torch.arange(total - new, total)[:, None]
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
