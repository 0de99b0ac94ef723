"""Causal attention over keys and values in pages; the maths is in README.md.

`T` tokens, `R` rows, `Q` query heads, `K` key/value heads, `P` head size, `B` pages, `S` tokens of a page, `W` table
width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def write_kv(pool_B2SKP: Tensor, k_TKP: Tensor, v_TKP: Tensor, places_T: Tensor) -> None:
    """Stores each token's key and value at `places[t]` = page * S + offset; -1 stores nothing.

    pool: `[B, 2, S, K, P]`, keys and values, with any stride between pages. places: `[T]` int64.
    """
    size = pool_B2SKP.shape[2]
    if bool((places_T < 0).any()):
        live = places_T >= 0
        places_T, k_TKP, v_TKP = places_T[live], k_TKP[live], v_TKP[live]
    pages, offsets = torch.div(places_T, size, rounding_mode="floor"), places_T % size
    pool_B2SKP[pages, 0, offsets] = k_TKP
    pool_B2SKP[pages, 1, offsets] = v_TKP


def decode_attention(
    q_RQP: Tensor,
    pool_B2SKP: Tensor,
    tables_RW: Tensor,
    lengths_R: Tensor,
    scale: float,
    longest: int,
    fresh: tuple[Tensor, Tensor, Tensor] | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of one query per row over the row's first `lengths[r]` keys, its own included, or over the last
    `window` of these. Returns `[R, Q, P]` in q's dtype.

    `fresh`: keys and values `[R, K, P]` and places `[R]` of the rows' own tokens, which are stored first, as by
    `write_kv`; without it they are in their pages already.

    tables: `[R, W]` page numbers in order, -1 after a row's pages; `longest`: the largest length, as the host knows it.
    Pages in a table must hold only finite values, but for those before the window, which are not read. A row of length
    0 is padding: its output is zeros.
    """
    if fresh is not None:
        write_kv(pool_B2SKP, *fresh)
    return decode_attention_after(q_RQP, pool_B2SKP, tables_RW, lengths_R, 0, scale, longest, window)


def decode_attention_after(
    q_RQP: Tensor, pool_B2SKP: Tensor, tables_RW: Tensor, lengths_R: Tensor, first: int, scale: float, longest: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """`decode_attention` over the keys from index `first` on; earlier keys get no weight."""
    rows, heads, width = q_RQP.shape
    size, kv_heads = pool_B2SKP.shape[2:4]
    count = -(-longest // size)
    tables = tables_RW[:, :count]
    begins_R1: int | Tensor = 0
    firsts_R1: int | Tensor = first
    if window is not None and window < longest:
        # As many pages as a window may reach into, from its first page on.
        firsts_R1 = (lengths_R[:, None] - window).clamp(min=first)
        pages_R1, count = firsts_R1 // size, min(count, 1 - (1 - window) // size)
        columns = pages_R1 + torch.arange(count, device=q_RQP.device)
        tables = tables_RW.gather(1, columns.clamp(max=tables_RW.shape[1] - 1))
        begins_R1 = pages_R1 * size
    pages = torch.where(tables < 0, tables[:, :1].clamp(min=0), tables).reshape(-1)
    shape = (rows, count * size, kv_heads, width)
    k, v = (pool_B2SKP[:, i].index_select(0, pages).view(shape).transpose(1, 2) for i in (0, 1))
    places = begins_R1 + torch.arange(count * size, device=q_RQP.device)
    closed_RS = (places < firsts_R1) | (places >= lengths_R[:, None])
    bias = torch.zeros(closed_RS.shape, dtype=k.dtype, device=k.device).masked_fill_(closed_RS, float("-inf"))
    q = q_RQP.view(rows, kv_heads, heads // kv_heads, width)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None], scale=scale).reshape(q_RQP.shape)
    return torch.where((lengths_R > first)[:, None, None], out, out.new_zeros(()))


def extend_attention(
    q_TQP: Tensor,
    k_TKP: Tensor,
    v_TKP: Tensor,
    pool_B2SKP: Tensor,
    tables_RW: Tensor,
    computed_R: Tensor,
    starts_R: Tensor,
    scale: float,
    places_T: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of each row's new tokens to the row's earlier keys (in pages) and to each other, causally; with a
    `window`, of each token to that many latest keys, its own included.

    q, k, v: packed new tokens, row r is `starts[r]:starts[r+1]`. `computed[r]`: number of earlier keys. With `places`
    the new keys are stored, as by `write_kv`; without, they are in their pages already. Returns `[T, Q, P]` in q's
    dtype; zeros for tokens after the last row.
    """
    if places_T is not None:
        write_kv(pool_B2SKP, k_TKP, v_TKP, places_T)
    heads, kv_heads = q_TQP.shape[1], k_TKP.shape[1]
    bounds, computed = starts_R.tolist(), computed_R.tolist()
    outs = []
    for row, old in enumerate(computed):
        begin, end = bounds[row], bounds[row + 1]
        if begin == end:
            continue
        q = q_TQP[begin:end].transpose(0, 1)[None]
        first = 0 if window is None else max(old + 1 - window, 0)
        if old == 0:
            k, v = k_TKP[begin:end], v_TKP[begin:end]
        else:
            k, v = _gather(pool_B2SKP, tables_RW[row], first, old + end - begin)
        k, v = (_repeat(t.transpose(0, 1)[None], heads // kv_heads) for t in (k, v))
        mask, behind, windowed = None, old - first, window is not None and window < old + end - begin
        if old or windowed:
            mask = torch.ones(end - begin, behind + end - begin, dtype=torch.bool, device=q.device).tril_(behind)
            if window is not None:
                mask.triu_(behind + 1 - window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        outs.append(out[0].transpose(0, 1))
    if bounds[-1] < q_TQP.shape[0]:
        outs.append(torch.zeros_like(q_TQP[bounds[-1] :]))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _gather(pool_B2SKP: Tensor, table_W: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [first, end) of one row, `[end - first, K, P]` each."""
    size = pool_B2SKP.shape[2]
    begin = first // size
    pages, part = table_W[begin : -(-end // size)], slice(first - begin * size, end - begin * size)
    k, v = (pool_B2SKP[:, i].index_select(0, pages).flatten(0, 1)[part] for i in (0, 1))
    return k, v


def _repeat(x_1KSP: Tensor, times: int) -> Tensor:
    """Repeats each key/value head for the query heads that share it."""
    return x_1KSP if times == 1 else x_1KSP.repeat_interleave(times, dim=1)
