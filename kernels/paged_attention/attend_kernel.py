"""Attention over pages: the program. Letters as in `kernel.py`, which launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.launch import OF_ROWS
from kernels.segment_kernel import find_segment


@triton.jit
def _load(p, m, MASKED: tl.constexpr):
    """A block of keys or values; without MASKED, all of it is known to be there."""
    if MASKED:
        return tl.load(p, mask=m, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def _store_new(p_places, keys, values, pages, i_head, o_new, m_new, o_p, m_p, SIZE: tl.constexpr):
    """Stores the new keys and values of the tokens `o_new` in their pages; tokens whose place is negative have none.
    `keys`, `values`: pointer and strides of tokens and heads. `pages`: pointer and strides of pages, sides, places and
    heads."""
    p_k, k_token, k_head = keys
    p_v, v_token, v_head = values
    p_pool, pool_page, pool_side, pool_place, pool_head = pages
    place = tl.load(p_places + o_new, mask=m_new, other=-1).to(tl.int64)
    m = (place >= 0)[:, None] & m_p[None, :]
    at = (place // SIZE) * pool_page + (place % SIZE) * pool_place + i_head * pool_head
    at = at[:, None] + o_p[None, :]
    k = tl.load(p_k + (o_new * k_token + i_head * k_head)[:, None] + o_p[None, :], mask=m, other=0.0)
    v = tl.load(p_v + (o_new * v_token + i_head * v_head)[:, None] + o_p[None, :], mask=m, other=0.0)
    tl.store(p_pool + at, k, mask=m)
    tl.store(p_pool + pool_side + at, v, mask=m)


@triton.jit
def _find_tokens(p_starts, rows, tokens, i_block, PER_BLOCK: tl.constexpr):
    """(row, whether it is a real one, its first token in the launch, the first token of block `i_block` in the row,
    number of the row's tokens). Row number `rows` is the padding after the last row, which gets zeros."""
    i_row = find_segment(p_starts, rows + 1, i_block, PER_BLOCK)
    real = i_row < rows
    begin = tl.load(p_starts + i_row).to(tl.int32)
    end = tl.load(p_starts + i_row + 1, mask=real, other=tokens).to(tl.int32)
    first = (i_block - begin // PER_BLOCK - i_row) * PER_BLOCK
    return i_row, real, begin, first, end - begin


@triton.jit
def _split_blocks(i_split, start, blocks, together, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """(first block of keys of a split, the block behind its last one), from `start` to `blocks`.

    Splits of at least LEAST blocks depend on the row's own length only, so that other rows of the batch do not change
    its rounding. Old and new keys may make one block more than all keys together (`together`): it belongs to the last
    split, or a row of SPLITS * LEAST blocks would be divided otherwise than in a launch with more splits."""
    if SPLITS > 1:
        divided = tl.maximum(together - start, 1)
        share = tl.maximum(tl.cdiv(divided, SPLITS), LEAST)
        low = start + tl.where(i_split * share < divided, i_split * share, blocks)
        return low, tl.where((i_split + 1) * share < divided, low + share, blocks)
    else:  # as with several splits: with `start` and `blocks` themselves, programs of sm_86 and sm_100 spill
        low = start + i_split * (blocks - start)
        return low, tl.minimum(low + blocks, blocks)


@triton.jit
def _update(q, k, v, m_open, acc, top, total, scale, MASKED: tl.constexpr):
    """Processes one block of keys: updates `acc`, `top` (largest score, base 2) and `total` of the running softmax.
    Without MASKED every query sees every key of the block."""
    scores = tl.dot(q, k, input_precision="ieee")
    if MASKED:
        scores = tl.where(m_open, scores, float("-inf"))
    top_before = top
    top = tl.maximum(top, tl.max(scores, 1) * scale)
    shift = top
    if MASKED:
        shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(top_before - shift)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, top, total * decay + tl.sum(weights, 1)


@triton.jit
def _old_keys(o_key, old, open_from, skip, SKIPS: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys in pages a program reads."""
    if WINDOW:  # a key before the first one has a negative place, which is a large unsigned number
        m_n = (o_key - open_from).to(tl.uint32, bitcast=True) < (old - open_from).to(tl.uint32, bitcast=True)
    else:
        m_n = o_key < old
    if SKIPS:
        m_n = m_n & (o_key >= skip)
    return m_n


@triton.jit
def _sees_old(o_key, m_n, o_token, old, LIMIT: tl.constexpr):
    """Which queries see which of the keys in pages; LIMIT: the window of several tokens, else 0."""
    if LIMIT:
        # One comparison each: gfx942 has too few scalar registers for more masks.
        return tl.where(m_n, old - o_key, LIMIT)[None, :] < LIMIT - o_token[:, None]
    else:
        return m_n[None, :]


@triton.jit
def _sees_new(o_key, m_n, o_token, WINDOW: tl.constexpr):
    """Which queries see which of the new keys."""
    if WINDOW:  # a key after the query has a negative distance, which is a large unsigned number
        return (o_token[:, None] - o_key[None, :]).to(tl.uint32, bitcast=True) < WINDOW
    else:
        return m_n[None, :] & (o_key[None, :] <= o_token[:, None])


@triton.jit(do_not_specialize=["rows", "tokens", "skip"], do_not_specialize_on_alignment=OF_ROWS)
def attend(
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
    PAGED_STAGES: tl.constexpr,  # of the loops that read pages
    WINDOW: tl.constexpr,  # latest keys that a query attends to, its own included; 0: all
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
        # The last block of a prompt has the most keys, so it begins first.
        i_block = tl.num_programs(0) - 1 - tl.program_id(0)
        i_row, real, begin, first, count = _find_tokens(p_starts, rows, tokens, i_block, PER_BLOCK)
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

    if WRITE:
        if i_split == 0:
            o_w = tl.arange(0, BLOCK_W)
            o_new = (begin + first + o_w).to(tl.int64)
            m_new = (o_w < PER_BLOCK) & (first + o_w < count)
            keys, values = (p_k, k_token, k_head), (p_v, v_token, v_head)
            pages = (p_pool, pool_page, pool_side, pool_place, pool_head)
            _store_new(p_places, keys, values, pages, i_head, o_new, m_new, o_p, m_p, SIZE)

    blocks_old = tl.cdiv(old, BLOCK_N)
    blocks = blocks_old + (tl.cdiv(new, BLOCK_N) if FRESH else 0)
    start = 0
    open_from = 0
    if WINDOW:
        position = length - 1 if DECODE else old + first
        open_from = tl.maximum(position + 1 - WINDOW, 0)  # the first key that the program reads
        start = tl.where(open_from < old, open_from // BLOCK_N, blocks_old + (open_from - old) // BLOCK_N)
    low, high = _split_blocks(i_split, start, blocks, tl.cdiv(old + new, BLOCK_N), SPLITS, SPLIT // BLOCK_N)
    if SPLITS > 1:
        if low >= high:  # most splits of a short row in a graph for long ones: `merge` reads no sums of these
            at = (i_split.to(tl.int64) * tokens + o_global) * HEADS + o_query
            tl.store(p_lse + at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=m_m)
            return
    q = tl.load(
        p_q + (o_global * q_token + o_query * q_head)[:, None] + o_p[None, :],
        mask=m_m[:, None] & m_p[None, :],
        other=0.0,
    )
    acc = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # Blocks whose keys every query of the program sees need no masks. A decode row only waits for memory.
    NARROW: tl.constexpr = P < BLOCK_P
    p_table = p_tables + i_row.to(tl.int64) * table_row
    p_side = p_pool + i_head.to(tl.int64) * pool_head
    masked_old = low
    if not SKIPS and not DECODE and not WINDOW:
        masked_old = tl.maximum(low, old // BLOCK_N)
        for i in tl.range(low, tl.minimum(high, old // BLOCK_N), num_stages=PAGED_STAGES):
            o_key = i * BLOCK_N + o_n
            page = tl.load(p_table + o_key // SIZE).to(tl.int64)
            at = page * pool_page + (o_key % SIZE) * pool_place
            k = _load(p_side + at[None, :] + o_p[:, None], m_p[:, None], NARROW)
            v = _load(p_side + pool_side + at[:, None] + o_p[None, :], m_p[None, :], NARROW)
            acc, top, total = _update(q, k, v, True, acc, top, total, scale, False)
    MASKED_STAGES: tl.constexpr = PAGED_STAGES if SKIPS or DECODE or WINDOW else None  # or one block at most
    for i in tl.range(masked_old, tl.minimum(high, blocks_old), num_stages=MASKED_STAGES):
        o_key = i * BLOCK_N + o_n
        m_n = _old_keys(o_key, old, open_from, skip, SKIPS, WINDOW)
        page = tl.load(p_table + o_key // SIZE, mask=m_n, other=0).to(tl.int64)
        at = page * pool_page + (o_key % SIZE) * pool_place
        k = _load(p_side + at[None, :] + o_p[:, None], m_n[None, :] & m_p[:, None], True)
        v = _load(p_side + pool_side + at[:, None] + o_p[None, :], m_n[:, None] & m_p[None, :], True)
        m_open = _sees_old(o_key, m_n, o_token, old, 0 if DECODE else WINDOW)
        acc, top, total = _update(q, k, v, m_open, acc, top, total, scale, True)
    if FRESH:
        p_k_head = p_k + i_head.to(tl.int64) * k_head
        p_v_head = p_v + i_head.to(tl.int64) * v_head
        masked_new = tl.maximum(low, blocks_old)
        if not DECODE and not WINDOW:
            open_new = blocks_old + tl.minimum(first + 1, new) // BLOCK_N
            for i in range(masked_new, tl.minimum(high, open_new)):
                at = (begin + (i - blocks_old) * BLOCK_N + o_n).to(tl.int64)
                k = _load(p_k_head + (at * k_token)[None, :] + o_p[:, None], m_p[:, None], NARROW)
                v = _load(p_v_head + (at * v_token)[:, None] + o_p[None, :], m_p[None, :], NARROW)
                acc, top, total = _update(q, k, v, True, acc, top, total, scale, False)
            masked_new = tl.maximum(masked_new, open_new)
        for i in range(masked_new, high):
            o_key = (i - blocks_old) * BLOCK_N + o_n
            m_n = o_key < new
            at = (begin + o_key).to(tl.int64)
            k = _load(p_k_head + (at * k_token)[None, :] + o_p[:, None], m_n[None, :] & m_p[:, None], True)
            v = _load(p_v_head + (at * v_token)[:, None] + o_p[None, :], m_n[:, None] & m_p[None, :], True)
            m_open = _sees_new(o_key, m_n, o_token, WINDOW)
            acc, top, total = _update(q, k, v, m_open, acc, top, total, scale, True)

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
def merge(
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
