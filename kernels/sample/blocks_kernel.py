"""The launches of sampling that divide a row into blocks of the vocabulary. Letters as in `kernel.py`, which launches
them."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sample.row_kernel import (
    OF_ROWS,
    bin_of,
    bins_per_unit,
    filters_of,
    goal_of,
    key_of,
    largest_of,
    mask_of,
    scaled_logits,
    sums_before,
    target_of,
    uniform_of,
    weight_of,
)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def extremes(  # type: ignore[no-untyped-def]
    p_logits,  # [R, V]
    p_temperature,  # [R] float32
    p_top_k,  # [R] int64
    p_top_p,  # [R] float64
    p_min_p,  # [R] float64
    p_words,  # [G, W] int32, if MASKED
    p_masks,  # [R] int64, if MASKED
    p_largest,  # [R, N] float32
    p_smallest,  # [R, N] float32: of the values above -inf
    p_first,  # [R, N] int32: the id of the largest value, the lowest among equals
    p_masses,  # [R, BINS] int64: set to 0 for `weigh`
    p_counts,  # [R, BINS] int64: set to 0 for `weigh`
    p_listed,  # [R] int32: set to 0 for `collect`
    logits_row,
    words_row,
    vocab,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    p_bits, masked = mask_of(p_words, p_masks, i_row, words_row, MASKED)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    x = scaled_logits(p_logits + i_row * logits_row, p_bits, masked, temperature, o, vocab, MASKED)
    largest = tl.max(x, 0)
    place = i_row * tl.num_programs(0) + i_block
    tl.store(p_largest + place, largest)
    tl.store(p_smallest + place, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
    tl.store(p_first + place, tl.min(tl.where(x == largest, o, vocab), 0))
    _, _, _, filtered = filters_of(p_top_k, p_top_p, p_min_p, i_row)
    if (i_block == 0) & (temperature > 0) & filtered:
        o_bins = i_row * BINS + tl.arange(0, BINS)
        tl.store(p_masses + o_bins, tl.zeros([BINS], tl.int64))
        tl.store(p_counts + o_bins, tl.zeros([BINS], tl.int64))
        tl.store(p_listed + i_row, 0)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def weigh(  # type: ignore[no-untyped-def]
    p_logits,  # [R, V]
    p_temperature,  # [R] float32
    p_top_k,  # [R] int64
    p_top_p,  # [R] float64
    p_min_p,  # [R] float64
    p_words,  # [G, W] int32, if MASKED
    p_masks,  # [R] int64, if MASKED
    p_largest,  # [R, N] float32
    p_smallest,  # [R, N] float32
    p_sums,  # [R, N] int64: weights of blocks; with filters, of the tokens that min-p keeps
    p_masses,  # [R, BINS] int64: weights of bins
    p_counts,  # [R, BINS] int64: numbers of values that weigh something, with top-k
    logits_row,
    words_row,
    vocab,
    blocks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
):
    i_block = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    if temperature <= 0:
        return
    p_bits, masked = mask_of(p_words, p_masks, i_row, words_row, MASKED)
    o = i_block * BLOCK + tl.arange(0, BLOCK)
    x = scaled_logits(p_logits + i_row * logits_row, p_bits, masked, temperature, o, vocab, MASKED)
    top = largest_of(p_largest, i_row, blocks, N)
    weight = weight_of(x, top)
    top_k, _, min_p, filtered = filters_of(p_top_k, p_top_p, p_min_p, i_row)
    likely = weight
    if min_p > 0.0:
        likely = tl.where(tl.exp(x - top).to(tl.float64) >= min_p, weight, 0)
    tl.store(p_sums + i_row * blocks + i_block, tl.sum(likely, 0))
    if filtered:
        per_unit = bins_per_unit(p_smallest, i_row, blocks, top, N, BINS)
        o_bins = i_row * BINS + bin_of(x, top, per_unit, BINS)
        tl.atomic_add(p_masses + o_bins, weight, mask=weight > 0, sem="relaxed")
        if top_k > 0:
            tl.atomic_add(p_counts + o_bins, tl.full([BLOCK], 1, tl.int64), mask=weight > 0, sem="relaxed")


@triton.jit
def _bounds(p_counts, o_bins, ends, top_k, top_p, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(bin of the last token that top-k keeps, first and last bin that may contain the last one that top-p keeps, least
    and largest weight of the tokens that both keep). `ends`: cumulative weights of the row's bins `o_bins`, which show
    no more. A filter that is off has no bins."""
    total = tl.max(ends, 0)
    low = total
    high = total
    bin_k = tl.full([], BINS, tl.int32)
    if top_k > 0:
        less = tl.cumsum(tl.load(p_counts + o_bins), 0) < top_k
        bin_k = tl.sum(less.to(tl.int32), 0)
        if bin_k < BINS:
            low = tl.max(tl.where(less, ends, 0), 0)
            high = tl.min(tl.where(less, total, ends), 0)
    first_p = tl.full([], BINS, tl.int32)
    last_p = tl.full([], -1, tl.int32)
    if top_p < 1.0:
        goal = goal_of(top_p, high)
        first_p, least = sums_before(ends, goal_of(top_p, low))
        last_p, _ = sums_before(ends, goal)
        low = tl.minimum(low, least)
        high = tl.minimum(high, tl.min(tl.where(ends < goal, total, ends), 0))
    return bin_k, first_p, last_p, low, high


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def collect(  # type: ignore[no-untyped-def]
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
    p_largest,  # [R, N] float32
    p_smallest,  # [R, N] float32
    p_sums,  # [R, N] int64
    p_masses,  # [R, BINS] int64
    p_counts,  # [R, BINS] int64
    p_listed,  # [R] int32: number of values that belong in the list
    p_entries,  # [R, ENTRIES] int64: key << 32 | id
    logits_row,
    words_row,
    vocab,
    blocks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
    SPAN: tl.constexpr,
):
    i_row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    top_k, top_p, min_p, filtered = filters_of(p_top_k, p_top_p, p_min_p, i_row)
    if (temperature <= 0) | (not filtered):
        return
    # The bins that may contain the last token of each prefix and the drawn one.
    o_bins = i_row * BINS + tl.arange(0, BINS)
    ends = tl.cumsum(tl.load(p_masses + o_bins), 0)
    bin_k, first_p, last_p, low, high = _bounds(p_counts, o_bins, ends, top_k, top_p, BINS)
    if min_p > 0.0:
        o_blocks = tl.arange(0, N)
        likely = tl.sum(tl.load(p_sums + i_row * blocks + o_blocks, mask=o_blocks < blocks, other=0), 0)
        low = tl.minimum(low, likely)
        high = tl.minimum(high, likely)
    uniform = uniform_of(p_seeds, p_samples, p_positions, i_row)
    first, _ = sums_before(ends, target_of(uniform, low) + 1)
    last, _ = sums_before(ends, target_of(uniform, high) + 1)

    p_bits, masked = mask_of(p_words, p_masks, i_row, words_row, MASKED)
    top = largest_of(p_largest, i_row, blocks, N)
    per_unit = bins_per_unit(p_smallest, i_row, blocks, top, N, BINS)
    for i in range(SPAN):
        o = (tl.program_id(0) * SPAN + i) * BLOCK + tl.arange(0, BLOCK)
        x = scaled_logits(p_logits + i_row * logits_row, p_bits, masked, temperature, o, vocab, MASKED)
        bins = bin_of(x, top, per_unit, BINS)
        m = (bins == bin_k) | ((bins >= first_p) & (bins <= last_p)) | ((bins >= first) & (bins <= last))
        m &= weight_of(x, top) > 0
        ranks = tl.cumsum(m.to(tl.int32), 0)
        count = tl.max(ranks, 0)
        if count > 0:
            place = tl.atomic_add(p_listed + i_row, count, sem="relaxed") + ranks - 1
            entry = (key_of(x).to(tl.int64) << 32) | o.to(tl.int64)
            tl.store(p_entries + i_row * ENTRIES + place, entry, mask=m & (place < ENTRIES))
