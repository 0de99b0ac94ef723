"""The last launch of sampling: one program draws a row's token. Letters as in `kernel.py`, which launches it."""

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
    value_of,
    weight_of,
)


@triton.jit
def _read(values, o, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(keys, ids) of the values at `o`. `values`: the list's entries, the row's logits (first arguments of
    `scaled_logits`), the number of values, and whether they are those in the list or all of the row."""
    p_entries, row, n, listed = values
    if listed:
        entry = tl.load(p_entries + o, mask=o < n, other=0)
        key, ids = (entry >> 32).to(tl.int32), entry.to(tl.int32)
    else:
        p_row, p_bits, masked, temperature = row
        key, ids = key_of(scaled_logits(p_row, p_bits, masked, temperature, o, n, MASKED)), o
    return key, ids


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    values,
    scale,
    bin,
    least,
    goal,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """In one bin: (largest key such that the values with at least this key number at least `least` and weigh at least
    `goal`, number of values with larger keys, their total weight, weight of one value with this key)."""
    n = values[2]
    top, per_unit = scale
    smallest = tl.full([BLOCK], (1 << 31) - 1, tl.int32)
    largest = tl.full([BLOCK], -(1 << 31), tl.int32)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        key, _ = _read(values, o, MASKED)
        x = value_of(key)
        m = (o < n) & (bin_of(x, top, per_unit, BINS) == bin) & (weight_of(x, top) > 0)
        smallest = tl.where(m, tl.minimum(smallest, key), smallest)
        largest = tl.where(m, tl.maximum(largest, key), largest)
    low = tl.min(smallest, 0).to(tl.int64)
    high = tl.max(largest, 0).to(tl.int64) + 1
    end = high
    above = tl.full([], 0, tl.int64)
    mass_above = tl.full([], 0, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        counts = tl.zeros([BLOCK], tl.int64)
        masses = tl.zeros([BLOCK], tl.int64)
        for i in range(0, n, BLOCK):
            o = i + tl.arange(0, BLOCK)
            key, _ = _read(values, o, MASKED)
            m = (o < n) & (key >= middle) & (key < end)
            counts += m.to(tl.int64)
            masses += tl.where(m, weight_of(value_of(key), top), 0)
        count = tl.sum(counts, 0)
        mass = tl.sum(masses, 0)
        if (count >= least) & (mass >= goal):
            low = middle
        else:
            high = middle
            above = count
            mass_above = mass
    key = low.to(tl.int32)
    return key, above, mass_above, tl.maximum(weight_of(value_of(key), top), 1)


@triton.jit
def _kept(  # type: ignore[no-untyped-def]
    values, scale, p_counts, o_bins, ends, top_k, top_p, MASKED: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    """Weight of the tokens that top-k and top-p keep. `ends`: cumulative weights of the row's bins `o_bins`."""
    one = tl.full([], 1, tl.int64)
    mass = tl.max(ends, 0)
    if top_k > 0:
        counts = tl.cumsum(tl.load(p_counts + o_bins), 0)
        bin, number = sums_before(counts, top_k)
        if bin < BINS:
            before = tl.max(tl.where(counts < top_k, ends, 0), 0)
            wanted = top_k - number
            _, above, mass_above, weight = _cut(values, scale, bin, wanted, one, MASKED, BLOCK, BINS)
            mass = before + mass_above + (wanted - above) * weight
    kept = mass
    if top_p < 1.0:
        goal = goal_of(top_p, mass)
        bin, before = sums_before(ends, goal)
        _, _, mass_above, weight = _cut(values, scale, bin, one, goal - before, MASKED, BLOCK, BINS)
        reached = (goal - before - mass_above + weight - 1) // weight
        kept = tl.minimum(kept, before + mass_above + reached * weight)
    return kept


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    values, key, index, vocab, MASKED: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr
):
    """Of the tokens with this key, the one with `index` lower ids. The list is not in the order of ids, so these tokens
    are counted by block."""
    n = values[2]
    equal = tl.zeros([N], tl.int32)
    for i in range(0, n, TILE):
        o = i + tl.arange(0, TILE)
        keys, ids = _read(values, o, MASKED)
        equal += tl.histogram(ids // BLOCK, N, mask=(o < n) & (keys == key))
    block, passed = sums_before(tl.cumsum(equal, 0), index + 1)
    token = tl.full([], 0, tl.int32) + vocab
    for i in range(0, n, TILE):
        o = i + tl.arange(0, TILE)
        keys, ids = _read(values, o, MASKED)
        m = (o < n) & (keys == key) & (ids // BLOCK == block)
        ranks = passed + tl.cumsum(m.to(tl.int32), 0)
        token = tl.minimum(token, tl.min(tl.where(m & (ranks > index), ids, vocab), 0))
        passed = tl.max(ranks, 0)
    return token


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def draw(  # type: ignore[no-untyped-def]
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
    p_first,  # [R, N] int32
    p_sums,  # [R, N] int64
    p_masses,  # [R, BINS] int64
    p_counts,  # [R, BINS] int64
    p_listed,  # [R] int32
    p_entries,  # [R, ENTRIES] int64
    p_out,  # [R] int64
    logits_row,
    words_row,
    vocab,
    blocks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(p_temperature + i_row)
    top = largest_of(p_largest, i_row, blocks, N)
    o_blocks = tl.arange(0, N)
    m_blocks = o_blocks < blocks
    if temperature <= 0:
        largest = tl.load(p_largest + i_row * blocks + o_blocks, mask=m_blocks, other=float("-inf"))
        first = tl.load(p_first + i_row * blocks + o_blocks, mask=m_blocks, other=vocab)
        token = tl.min(tl.where(largest == top, first, vocab), 0)
        tl.store(p_out + i_row, tl.minimum(token, vocab - 1).to(tl.int64))
        return

    p_row = p_logits + i_row * logits_row
    p_bits, masked = mask_of(p_words, p_masks, i_row, words_row, MASKED)
    top_k, top_p, min_p, filtered = filters_of(p_top_k, p_top_p, p_min_p, i_row)
    uniform = uniform_of(p_seeds, p_samples, p_positions, i_row)
    sums = tl.load(p_sums + i_row * blocks + o_blocks, mask=m_blocks, other=0)
    total = tl.sum(sums, 0)
    if not filtered:
        target = target_of(uniform, total)
        block, before = sums_before(tl.cumsum(sums, 0), target + 1)
        o = block * BLOCK + tl.arange(0, BLOCK)
        weight = weight_of(scaled_logits(p_row, p_bits, masked, temperature, o, vocab, MASKED), top)
        token = tl.min(tl.where(before + tl.cumsum(weight, 0) > target, o, vocab), 0)
        tl.store(p_out + i_row, tl.minimum(token, vocab - 1).to(tl.int64))
        return

    # The bins show where the last token of each prefix is, so that only the values of one bin decide. They are in the
    # list; if it is too small for them, the whole row is read.
    n = tl.load(p_listed + i_row)
    listed = n <= ENTRIES
    n = tl.where(listed, n, vocab)
    p_entries += i_row * ENTRIES
    scale = (top, bins_per_unit(p_smallest, i_row, blocks, top, N, BINS))
    values = (p_entries, (p_row, p_bits, masked, temperature), n, listed)
    o_bins = i_row * BINS + tl.arange(0, BINS)
    ends = tl.cumsum(tl.load(p_masses + o_bins), 0)
    kept = _kept(values, scale, p_counts, o_bins, ends, top_k, top_p, MASKED, TILE, BINS)
    target = target_of(uniform, tl.minimum(kept, total))
    bin, before = sums_before(ends, target + 1)
    one = tl.full([], 1, tl.int64)
    key, _, mass_above, weight = _cut(values, scale, bin, one, target + 1 - before, MASKED, TILE, BINS)
    index = ((target - before - mass_above) // weight).to(tl.int32)
    token = _find(values, key, index, vocab, MASKED, BLOCK, N, TILE)
    tl.store(p_out + i_row, tl.minimum(token, vocab - 1).to(tl.int64))
