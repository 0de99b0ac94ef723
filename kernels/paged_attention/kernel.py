"""Attention over pages in Triton: decode, extend, prefill and speculative rows by one kernel; see README.md.

`T` tokens, `R` rows, `Q` query heads, `K` key/value heads, `P` head size, `B` pages, `S` tokens of a page, `W` table
width, `G` query heads of a key/value head, `L` splits. A block of a program is M = (tokens x G) queries of one
key/value head against N keys at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import by_architecture, launch
from kernels.varlen_attention.kernel import find_segment

MAX_SPLITS = 32
SPLIT_KEYS = 512
"""A row's keys are shared out to splits of at least so many: by the row's own length, never by its batch."""
SPLIT_TOKENS = 256
"""Beyond so many query tokens the blocks of queries keep a GPU busy without splits."""


@dataclass(frozen=True)
class Tile:
    """One configuration: queries and keys of a block, warps, stages of the load pipeline."""

    m: int
    n: int
    warps: int
    stages: int


# By architecture, then by the queries that a row brings (tokens x G): at most 16, at most 64, more. Chosen for zero
# spills at head size 128.
TILES = {
    "sm_80": (Tile(16, 64, 4, 3), Tile(64, 32, 8, 3), Tile(64, 64, 8, 3)),
    "sm_90": (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    "sm_100": (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    "gfx942": (Tile(16, 32, 4, 1), Tile(64, 32, 4, 1), Tile(128, 32, 8, 1)),
}
TILES_FLOAT32 = (Tile(16, 16, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))


@triton.jit
def _update(q, k, v, m_open, acc, top, total, scale):  # type: ignore[no-untyped-def]
    """One block of keys: `acc`, `top` (largest score, base 2) and `total` of the running softmax."""
    scores = tl.dot(q, k, input_precision="ieee") * scale
    scores = tl.where(m_open, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(top - shift)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_top, total * decay + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["rows", "tokens", "skip"])
def _attend(  # type: ignore[no-untyped-def]
    p_q,  # [T, Q, P]
    p_k,  # [T, K, P]: new keys
    p_v,  # [T, K, P]
    p_pool,  # [B, 2, S, K, P]
    p_tables,  # [R, W]
    p_lengths,  # [R]: DECODE: keys, the new one included; else keys before the new ones
    p_starts,  # [R + 1]
    p_places,  # [T]
    p_out,  # [T, Q, P]
    p_part,  # [L, T, Q, P] float32
    p_lse,  # [L, T, Q] float32
    rows,
    tokens,
    skip,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    pool_page,
    pool_side,
    pool_place,
    pool_head,
    table_row,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    P: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    DECODE: tl.constexpr,
    FRESH: tl.constexpr,
    WRITE: tl.constexpr,
    SKIPS: tl.constexpr,
):
    PER_BLOCK: tl.constexpr = BLOCK_M // GROUP
    i_head = tl.program_id(1)
    i_split = tl.program_id(2)
    if DECODE:
        i_row = tl.program_id(0)
        begin = i_row
        first = 0
        count = 1
        length = tl.load(p_lengths + i_row).to(tl.int32)
        new = tl.where(length > 0, 1, 0) if FRESH else 0
        old = length - new
    else:
        # Row number `rows` is what lies behind the last row: padding, which gets zeros.
        i_block = tl.program_id(0)
        i_row = find_segment(p_starts, rows + 1, i_block, PER_BLOCK)
        real = i_row < rows
        begin = tl.load(p_starts + i_row).to(tl.int32)
        end = tl.load(p_starts + i_row + 1, mask=real, other=tokens).to(tl.int32)
        first = (i_block - begin // PER_BLOCK - i_row) * PER_BLOCK
        count = end - begin
        if first >= count:
            return
        old = tl.load(p_lengths + i_row, mask=real, other=0).to(tl.int32)
        new = tl.where(real, tl.minimum(first + PER_BLOCK, count), 0)

    o_m = tl.arange(0, BLOCK_M)
    o_p = tl.arange(0, BLOCK_P)
    o_n = tl.arange(0, BLOCK_N)
    o_token = first + o_m // GROUP
    o_query = i_head * GROUP + o_m % GROUP
    m_m = (o_m < PER_BLOCK * GROUP) & (o_token < count)
    m_p = o_p < P
    o_global = (begin + o_token).to(tl.int64)
    q = tl.load(
        p_q + (o_global * q_token + o_query * q_head)[:, None] + o_p[None, :],
        mask=m_m[:, None] & m_p[None, :],
        other=0.0,
    )

    if WRITE:
        if i_split == 0:
            o_w = tl.arange(0, BLOCK_W)
            o_new = (begin + first + o_w).to(tl.int64)
            m_new = (o_w < PER_BLOCK) & (first + o_w < count)
            place = tl.load(p_places + o_new, mask=m_new, other=-1).to(tl.int64)
            m_w = (place >= 0)[:, None] & m_p[None, :]
            at = (place // SIZE) * pool_page + (place % SIZE) * pool_place + i_head * pool_head
            at = at[:, None] + o_p[None, :]
            k_new = tl.load(p_k + (o_new * k_token + i_head * k_head)[:, None] + o_p[None, :], mask=m_w, other=0.0)
            v_new = tl.load(p_v + (o_new * v_token + i_head * v_head)[:, None] + o_p[None, :], mask=m_w, other=0.0)
            tl.store(p_pool + at, k_new, mask=m_w)
            tl.store(p_pool + pool_side + at, v_new, mask=m_w)

    blocks_old = tl.cdiv(old, BLOCK_N)
    blocks = blocks_old + (tl.cdiv(new, BLOCK_N) if FRESH else 0)
    # Shares depend on the row's own length alone, so that no other row of the batch changes how it is rounded.
    share = tl.maximum(tl.cdiv(blocks, SPLITS), SPLIT // BLOCK_N) if SPLITS > 1 else blocks
    low = i_split * share
    high = tl.minimum(low + share, blocks)
    acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    p_table = p_tables + i_row.to(tl.int64) * table_row
    p_side = p_pool + i_head.to(tl.int64) * pool_head
    for i in range(low, tl.minimum(high, blocks_old)):
        o_key = i * BLOCK_N + o_n
        m_n = o_key < old
        if SKIPS:
            m_n = m_n & (o_key >= skip)
        page = tl.load(p_table + o_key // SIZE, mask=m_n, other=0).to(tl.int64)
        at = page * pool_page + (o_key % SIZE) * pool_place
        k = tl.load(p_side + at[None, :] + o_p[:, None], mask=m_n[None, :] & m_p[:, None], other=0.0)
        v = tl.load(p_side + pool_side + at[:, None] + o_p[None, :], mask=m_n[:, None] & m_p[None, :], other=0.0)
        acc, top, total = _update(q, k, v, m_n[None, :], acc, top, total, scale)
    if FRESH:
        p_k_head = p_k + i_head.to(tl.int64) * k_head
        p_v_head = p_v + i_head.to(tl.int64) * v_head
        for i in range(tl.maximum(low, blocks_old), high):
            o_key = (i - blocks_old) * BLOCK_N + o_n
            m_n = o_key < new
            at = (begin + o_key).to(tl.int64)
            k = tl.load(p_k_head + (at * k_token)[None, :] + o_p[:, None], mask=m_n[None, :] & m_p[:, None], other=0.0)
            v = tl.load(p_v_head + (at * v_token)[:, None] + o_p[None, :], mask=m_n[:, None] & m_p[None, :], other=0.0)
            m_open = m_n[None, :] & (o_key[None, :] <= o_token[:, None])
            acc, top, total = _update(q, k, v, m_open, acc, top, total, scale)

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    m_out = m_m[:, None] & m_p[None, :]
    if SPLITS == 1:
        p_o = p_out + (o_global * out_token + o_query * out_head)[:, None] + o_p[None, :]
        tl.store(p_o, acc.to(p_out.dtype.element_ty), mask=m_out)
    else:
        at = (i_split.to(tl.int64) * tokens + o_global) * HEADS + o_query
        tl.store(p_part + at[:, None] * P + o_p[None, :], acc, mask=m_out)
        tl.store(
            p_lse + at, tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf")), mask=m_m
        )


@triton.jit(do_not_specialize=["tokens"])
def _merge(  # type: ignore[no-untyped-def]
    p_part,  # [L, T, Q, P] float32
    p_lse,  # [L, T, Q] float32: log2 of each split's total
    p_out,  # [T, Q, P]
    tokens,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_l = tl.arange(0, BLOCK_L)
    o_p = tl.arange(0, BLOCK_P)
    m_l = o_l < SPLITS
    m_p = o_p < P
    at = (o_l.to(tl.int64) * tokens + i_token) * HEADS + i_head
    lse = tl.load(p_lse + at, mask=m_l, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    m_part = (m_l & (weight > 0))[:, None] & m_p[None, :]
    part = tl.load(p_part + at[:, None] * P + o_p[None, :], mask=m_part, other=0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(p_out + i_token * out_token + i_head * out_head + o_p, out.to(p_out.dtype.element_ty), mask=m_p)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    p_pool,  # [B, 2, S, K, P]
    p_k,  # [T, K, P]
    p_v,  # [T, K, P]
    p_places,  # [T]
    pool_page,
    pool_side,
    pool_place,
    pool_head,
    k_token,
    k_head,
    v_token,
    v_head,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    place = tl.load(p_places + i_token).to(tl.int64)
    if place < 0:
        return
    o_h = tl.arange(0, BLOCK_H)[:, None]
    o_p = tl.arange(0, BLOCK_P)[None, :]
    m = (o_h < HEADS) & (o_p < P)
    p_to = p_pool + (place // SIZE) * pool_page + (place % SIZE) * pool_place + o_h * pool_head + o_p
    tl.store(p_to, tl.load(p_k + i_token * k_token + o_h * k_head + o_p, mask=m, other=0.0), mask=m)
    tl.store(p_to + pool_side, tl.load(p_v + i_token * v_token + o_h * v_head + o_p, mask=m, other=0.0), mask=m)


def write_kv(pool_B2SKP: Tensor, k_TKP: Tensor, v_TKP: Tensor, places_T: Tensor) -> None:
    """As the reference. No host sync."""
    tokens, heads, width = k_TKP.shape
    assert pool_B2SKP.stride(-1) == k_TKP.stride(-1) == v_TKP.stride(-1) == 1
    launch(
        _write,
        (tokens,),
        p_pool=pool_B2SKP,
        p_k=k_TKP,
        p_v=v_TKP,
        p_places=places_T,
        pool_page=pool_B2SKP.stride(0),
        pool_side=pool_B2SKP.stride(1),
        pool_place=pool_B2SKP.stride(2),
        pool_head=pool_B2SKP.stride(3),
        k_token=k_TKP.stride(0),
        k_head=k_TKP.stride(1),
        v_token=v_TKP.stride(0),
        v_head=v_TKP.stride(1),
        SIZE=pool_B2SKP.shape[2],
        HEADS=heads,
        P=width,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_P=triton.next_power_of_2(width),
        num_warps=4,
    )


def decode_attention(
    q_RQP: Tensor,
    pool_B2SKP: Tensor,
    tables_RW: Tensor,
    lengths_R: Tensor,
    scale: float,
    longest: int,
    fresh: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """As the reference. No host sync; `longest`, an upper bound, sizes the grid of splits and nothing else."""
    k, v, places = fresh or (q_RQP, q_RQP, None)
    return _launch(
        q_RQP, k, v, pool_B2SKP, tables_RW, lengths_R, None, places, scale, longest, decode=True, fresh=bool(fresh)
    )


def decode_attention_after(
    q_RQP: Tensor, pool_B2SKP: Tensor, tables_RW: Tensor, lengths_R: Tensor, first: int, scale: float, longest: int
) -> Tensor:
    """As the reference. No host sync."""
    given = (q_RQP, q_RQP, q_RQP, pool_B2SKP, tables_RW, lengths_R, None, None, scale, longest)
    return _launch(*given, decode=True, fresh=False, skip=first)


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
) -> Tensor:
    """As the reference. No host sync: the rows' lengths are read on the device, and tokens behind the last row get
    zeros. New keys are read from `k` and `v`, never from the pages that the same launch may be writing.
    """
    longest = tables_RW.shape[1] * pool_B2SKP.shape[2] + k_TKP.shape[0]
    return _launch(
        q_TQP, k_TKP, v_TKP, pool_B2SKP, tables_RW, computed_R, starts_R, places_T, scale, longest, decode=False
    )


def tile(dtype: torch.dtype, device: torch.device, queries: int) -> Tile:
    """The configuration for rows of about so many queries (tokens x G)."""
    few, some, many = TILES_FLOAT32 if dtype == torch.float32 else by_architecture(TILES, device)
    return few if queries <= 16 else some if queries <= 64 else many


def splits(tokens: int, longest: int) -> int:
    """Into how many parts the keys of a row may be cut: a power of two up to `MAX_SPLITS`."""
    if tokens > SPLIT_TOKENS:
        return 1
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(max(longest, 1), SPLIT_KEYS)))


def _launch(
    q_TQP: Tensor,
    k_TKP: Tensor,
    v_TKP: Tensor,
    pool_B2SKP: Tensor,
    tables_RW: Tensor,
    lengths_R: Tensor,
    starts_R: Tensor | None,
    places_T: Tensor | None,
    scale: float,
    longest: int,
    *,
    decode: bool,
    fresh: bool = True,
    skip: int = 0,
) -> Tensor:
    tokens, heads, width = q_TQP.shape
    out_TQP = torch.empty(tokens, heads, width, dtype=q_TQP.dtype, device=q_TQP.device)
    rows = lengths_R.shape[0]
    assert q_TQP.stride(-1) == k_TKP.stride(-1) == v_TKP.stride(-1) == pool_B2SKP.stride(-1) == 1
    kv_heads = pool_B2SKP.shape[3]
    group = heads // kv_heads
    per_row = 1 if decode else triton.cdiv(tokens, max(rows, 1))
    chosen = tile(q_TQP.dtype, q_TQP.device, group * per_row)
    block_m = max(chosen.m, triton.next_power_of_2(group))
    per_block = block_m // group
    parts = splits(tokens, longest)
    part = lse = out_TQP
    if parts > 1:
        part = torch.empty(parts, tokens, heads, width, dtype=torch.float32, device=q_TQP.device)
        lse = torch.empty(parts, tokens, heads, dtype=torch.float32, device=q_TQP.device)
    block_p = max(triton.next_power_of_2(width), 16)
    blocks = tokens if decode else tokens // per_block + rows + 1
    launch(
        _attend,
        (blocks, kv_heads, parts),
        p_q=q_TQP,
        p_k=k_TKP,
        p_v=v_TKP,
        p_pool=pool_B2SKP,
        p_tables=tables_RW,
        p_lengths=lengths_R,
        p_starts=lengths_R if starts_R is None else starts_R,
        p_places=lengths_R if places_T is None else places_T,
        p_out=out_TQP,
        p_part=part,
        p_lse=lse,
        rows=rows,
        tokens=tokens,
        skip=skip,
        scale=scale * 1.4426950408889634,
        q_token=q_TQP.stride(0),
        q_head=q_TQP.stride(1),
        k_token=k_TKP.stride(0),
        k_head=k_TKP.stride(1),
        v_token=v_TKP.stride(0),
        v_head=v_TKP.stride(1),
        pool_page=pool_B2SKP.stride(0),
        pool_side=pool_B2SKP.stride(1),
        pool_place=pool_B2SKP.stride(2),
        pool_head=pool_B2SKP.stride(3),
        table_row=tables_RW.stride(0),
        out_token=out_TQP.stride(0),
        out_head=out_TQP.stride(1),
        HEADS=heads,
        SIZE=pool_B2SKP.shape[2],
        P=width,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=chosen.n,
        BLOCK_P=block_p,
        BLOCK_W=triton.next_power_of_2(per_block),
        SPLITS=parts,
        SPLIT=SPLIT_KEYS,
        DECODE=decode,
        FRESH=fresh,
        WRITE=places_T is not None,
        SKIPS=skip > 0,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    if parts > 1:
        launch(
            _merge,
            (tokens, heads),
            p_part=part,
            p_lse=lse,
            p_out=out_TQP,
            tokens=tokens,
            out_token=out_TQP.stride(0),
            out_head=out_TQP.stride(1),
            HEADS=heads,
            P=width,
            BLOCK_P=block_p,
            SPLITS=parts,
            BLOCK_L=parts,
            num_warps=4,
        )
    return out_TQP
