"""Sampling in Triton: one program takes a row from logits to its token; the method is in README.md.

`R` rows, `V` tokens of the vocabulary. Probabilities are summed as integers (`UNIT` is 1), so that the order of
summation cannot change a draw.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import launch
from kernels.sample.rows import RowParams

UNIT = tl.constexpr(float(1 << 44))
MAX_VOCAB = 1 << 18
"""With a larger vocabulary the sum of a row could exceed 63 bits."""
BLOCK = 4096
CANDIDATES = 4096
"""Tokens with logits near the largest are copied to scratch memory if there are at most this many."""


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """int32 with the same order as the float32 `x`; applied to the bits, the function is its own inverse."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(x, top):  # type: ignore[no-untyped-def]
    """exp(x - top) as an integer, in units of 1 / UNIT."""
    return (tl.exp(x - top) * UNIT).to(tl.int64)


@triton.jit
def _reaching(p_x, n, key, top, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(number of the `n` values whose key is at least `key`, their total weight)."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        x = tl.load(p_x + o, mask=o < n, other=float("-inf"))
        m = (o < n) & (_key(x) >= key)
        count += m.to(tl.int32)
        mass += tl.where(m, _weight(x, top), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _cut(p_x, n, top, least, goal, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(largest key such that the values with at least this key number at least `least` and weigh at least `goal`,
    number of values with larger keys, their total weight, weight of one value with this key)."""
    low = tl.full([], -(1 << 31), tl.int64)
    high = _key(top).to(tl.int64) + 1
    above = tl.full([], 0, tl.int32)
    mass_above = tl.full([], 0, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2 - tl.where((low + high) % 2 < 0, 1, 0)
        count, mass = _reaching(p_x, n, middle, top, BLOCK)
        if (count >= least) & (mass >= goal):
            low = middle
        else:
            high = middle
            above = count
            mass_above = mass
    key = low.to(tl.int32)
    value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return key, above, mass_above, _weight(value, top)


@triton.jit
def _place_of(p_x, n, key, index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Index of the `index`-th of the values equal to `key`."""
    seen = tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int32)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        x = tl.load(p_x + o, mask=o < n, other=float("-inf"))
        m = (o < n) & (_key(x) == key)
        count = tl.sum(m.to(tl.int32), 0)
        if (seen <= index) & (index < seen + count):
            rank = tl.cumsum(m.to(tl.int32), 0) - 1 + seen
            found = tl.sum(tl.where(m & (rank == index), o, 0), 0)
        seen += count
    return found


@triton.jit
def _in_order_of_ids(p_x, n, top, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first id whose cumulative weight passes `target`."""
    passed = tl.full([], 0, tl.int64)
    found = tl.full([], 0, tl.int32)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        weight = _weight(tl.load(p_x + o, mask=o < n, other=float("-inf")), top)
        total = tl.sum(weight, 0)
        if (passed <= target) & (target < passed + total):
            ends = passed + tl.cumsum(weight, 0)
            found = tl.min(tl.where(ends > target, o, n), 0)
        passed += total
    return found


@triton.jit
def _filtered(  # type: ignore[no-untyped-def]
    p_x,
    n,
    possible,
    top,
    total,
    uniform,
    top_k,
    top_p,
    min_p,
    BLOCK: tl.constexpr,
):
    """Index of the drawn token among the `n` values at `p_x`, which are the likeliest of the row's `possible` tokens,
    in order of their ids; -1 if more values are needed."""
    everything, mass = _reaching(p_x, n, tl.full([], -(1 << 31), tl.int32), top, BLOCK)
    kept = tl.full([], 0, tl.int32) + possible
    enough = (top_p < 1.0) | (min_p > 0.0) | (n >= possible)
    measured = total
    if (top_k > 0) & (top_k < possible):
        kept = top_k.to(tl.int32)
        enough = (kept <= n) | (n >= possible)
        if (top_p < 1.0) & enough:
            _, above, mass_above, weight = _cut(p_x, n, top, kept, tl.full([], 0, tl.int64), BLOCK)
            measured = mass_above + (kept - above) * weight
    if (top_p < 1.0) & enough:
        goal = tl.maximum(tl.ceil(top_p * measured.to(tl.float64)).to(tl.int64), 1)
        goal = tl.minimum(goal, measured)
        if goal <= mass:
            _, above, mass_above, weight = _cut(p_x, n, top, tl.full([], 0, tl.int32), goal, BLOCK)
            reached = above + ((goal - mass_above + weight - 1) // tl.maximum(weight, 1)).to(tl.int32)
            kept = tl.minimum(kept, reached)
        else:
            enough = n >= possible
    if (min_p > 0.0) & enough:
        count = tl.full([], 0, tl.int32)
        for i in range(0, n, BLOCK):
            o = i + tl.arange(0, BLOCK)
            x = tl.load(p_x + o, mask=o < n, other=float("-inf"))
            count += tl.sum(((o < n) & (tl.exp(x - top).to(tl.float64) >= min_p)).to(tl.int32), 0)
        enough = (count < n) | (kept <= n) | (n >= possible)
        kept = tl.minimum(kept, count)
    place = tl.full([], -1, tl.int32)
    if enough:
        kept = tl.maximum(tl.minimum(kept, n), 1)
        _, above, mass_above, weight = _cut(p_x, n, top, kept, tl.full([], 0, tl.int64), BLOCK)
        mass = mass_above + (kept - above) * weight
        target = tl.minimum((uniform * mass.to(tl.float64)).to(tl.int64), mass - 1)
        key, _, mass_above, weight = _cut(p_x, n, top, tl.full([], 0, tl.int32), target + 1, BLOCK)
        place = _place_of(p_x, n, key, (target - mass_above) // tl.maximum(weight, 1), BLOCK)
    return place


# The rows' parameters are parts of one tensor and may have any alignment; compiling for each alignment would stall the
# steps that meet a new one.
OF_ROWS = ["p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_seeds", "p_samples", "p_positions", "p_masks"]


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _sample(  # type: ignore[no-untyped-def]
    p_logits,  # [R, V]
    p_temperature,  # [R] float32
    p_top_k,  # [R] int64
    p_top_p,  # [R] float64
    p_min_p,  # [R] float64
    p_seeds,  # [R] int64, the bits of an unsigned one
    p_samples,  # [R] int64
    p_positions,  # [R] int64
    p_words,  # [G, W] int32, if MASKED
    p_masks,  # [R] int64, if MASKED
    p_scratch,  # [R, V + C] float32
    p_ids,  # [R, C] int32
    p_out,  # [R] int64
    logits_row,
    words_row,
    vocab,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    p_x = p_scratch + i_row * (vocab + C)
    top = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    i_mask = tl.full([], -1, tl.int64)
    if MASKED:
        i_mask = tl.load(p_masks + i_row)
    for i in range(0, vocab, BLOCK):
        o = i + tl.arange(0, BLOCK)
        m = o < vocab
        x = tl.load(p_logits + i_row * logits_row + o, mask=m, other=float("-inf")).to(tl.float32)
        if MASKED:
            words = tl.load(p_words + i_mask * words_row + o // 32, mask=m & (i_mask >= 0), other=-1)
            x = tl.where((words >> (o % 32)) & 1 != 0, x, float("-inf"))
        x = tl.div_rn(x, divisor + tl.zeros([BLOCK], tl.float32))
        tl.store(p_x + o, x, mask=m)
        largest = tl.max(x, 0)
        if largest > top:
            best = tl.min(tl.where(x == largest, o, vocab), 0)
            top = largest
    if temperature <= 0:
        tl.store(p_out + i_row, best.to(tl.int64))
        return
    tl.debug_barrier()

    top_k = tl.load(p_top_k + i_row)
    top_p = tl.load(p_top_p + i_row)
    min_p = tl.load(p_min_p + i_row)
    position = tl.load(p_positions + i_row).to(tl.uint32)
    sample = tl.load(p_samples + i_row).to(tl.uint32)
    zero = tl.full([], 0, tl.uint32)
    seed = tl.load(p_seeds + i_row).to(tl.uint64, bitcast=True)
    first, second, _, _ = tl.philox(seed, position, sample, zero, zero)
    bits = (first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16

    # Numbers of values within 4, 8, 16 of the largest, and the total weight.
    near = tl.zeros([BLOCK], tl.int32)
    middle = tl.zeros([BLOCK], tl.int32)
    far = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    drawable = tl.zeros([BLOCK], tl.int32)
    for i in range(0, vocab, BLOCK):
        o = i + tl.arange(0, BLOCK)
        x = tl.load(p_x + o, mask=o < vocab, other=float("-inf"))
        if MASKED:
            drawable += (x > float("-inf")).to(tl.int32)
        near += (x >= top - 4).to(tl.int32)
        middle += (x >= top - 8).to(tl.int32)
        far += (x >= top - 16).to(tl.int32)
        mass += _weight(x, top)
    total = tl.sum(mass, 0)
    if (top_k <= 0) & (top_p >= 1.0) & (min_p <= 0.0):
        target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        tl.store(p_out + i_row, _in_order_of_ids(p_x, vocab, top, target, BLOCK).to(tl.int64))
        return

    possible = vocab
    if MASKED:
        possible = tl.sum(drawable, 0)
    near_count = tl.sum(near, 0)
    middle_count = tl.sum(middle, 0)
    far_count = tl.sum(far, 0)
    span = tl.where(far_count <= C, 16.0, tl.where(middle_count <= C, 8.0, 4.0))
    token = tl.full([], -1, tl.int32)
    if near_count <= C:
        n = tl.full([], 0, tl.int32)
        for i in range(0, vocab, BLOCK):
            o = i + tl.arange(0, BLOCK)
            x = tl.load(p_x + o, mask=o < vocab, other=float("-inf"))
            m = (o < vocab) & (x >= top - span)
            place = n + tl.cumsum(m.to(tl.int32), 0) - 1
            tl.store(p_x + vocab + place, x, mask=m)
            tl.store(p_ids + i_row * C + place, o, mask=m)
            n += tl.sum(m.to(tl.int32), 0)
        tl.debug_barrier()
        place = _filtered(p_x + vocab, n, possible, top, total, uniform, top_k, top_p, min_p, BLOCK)
        if place >= 0:
            token = tl.load(p_ids + i_row * C + place)
    if token < 0:
        token = _filtered(p_x, vocab, possible, top, total, uniform, top_k, top_p, min_p, BLOCK)
    tl.store(p_out + i_row, token.to(tl.int64))


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    p_tokens,  # [R, T]
    p_drafts,  # [R, T - 1]
    p_counts,  # [R]
    p_out,  # [R] int64
    tokens_row,
    drafts_row,
    DRAFTS: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    count = tl.load(p_counts + i_row)
    accepted = tl.full([], 0, tl.int64)
    for i in tl.static_range(DRAFTS):
        token = tl.load(p_tokens + i_row * tokens_row + i)
        draft = tl.load(p_drafts + i_row * drafts_row + i)
        accepted += ((accepted == i) & (i < count) & (token == draft)).to(tl.int64)
    tl.store(p_out + i_row, accepted)


def sample(logits_RV: Tensor, params: RowParams) -> Tensor:
    """Like the reference, in one launch. No host sync. Raises `ValueError` for a vocabulary above `MAX_VOCAB`."""
    rows, vocab = logits_RV.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab} tokens is above the maximum of {MAX_VOCAB} of the sampling kernel")
    device = logits_RV.device
    out = torch.empty(rows, dtype=torch.int64, device=device)
    scratch = torch.empty(rows, vocab + CANDIDATES, dtype=torch.float32, device=device)
    ids = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)
    masks = params.masks
    assert logits_RV.stride(1) == 1 and (masks is None or masks.words_GW.is_contiguous())
    launch(
        _sample,
        (rows,),
        p_logits=logits_RV,
        p_temperature=params.temperature_R,
        p_top_k=params.top_k_R,
        p_top_p=params.top_p_R,
        p_min_p=params.min_p_R,
        p_seeds=params.seeds_R,
        p_samples=params.samples_R,
        p_positions=params.positions_R,
        p_words=ids if masks is None else masks.words_GW,
        p_masks=params.positions_R if masks is None else masks.index_R,
        p_scratch=scratch,
        p_ids=ids,
        p_out=out,
        logits_row=logits_RV.stride(0),
        words_row=0 if masks is None else masks.words_GW.stride(0),
        vocab=vocab,
        MASKED=masks is not None,
        BLOCK=BLOCK,
        C=CANDIDATES,
        num_warps=16,
    )
    return out


def accept_drafts(tokens_RT: Tensor, drafts_RK: Tensor, counts_R: Tensor) -> Tensor:
    """Like the reference. No host sync."""
    rows, drafts = drafts_RK.shape
    out = torch.empty(rows, dtype=torch.int64, device=drafts_RK.device)
    launch(
        _accept,
        (rows,),
        p_tokens=tokens_RT,
        p_drafts=drafts_RK,
        p_counts=counts_R,
        p_out=out,
        tokens_row=tokens_RT.stride(0),
        drafts_row=drafts_RK.stride(0),
        DRAFTS=drafts,
        num_warps=1,
    )
    return out
